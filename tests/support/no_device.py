"""The executor for CUDA without a device: kernels in Triton's interpreter, streams one after the other."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

from baton.executor.cuda import executor as executor_module
from baton.executor.cuda import pool as pool_module
from baton.executor.cuda.chunks import MixedSize
from baton.executor.cuda.runner import ModelRunner


class Now:
    """A stream, or an event: everything has happened when it is asked."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def record(self, *_: object) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def wait(self, *_: object) -> None: ...

    def wait_event(self, _: object) -> None: ...


class Unmoved:
    """Blocks that nobody copies."""

    def __init__(self, pool: torch.Tensor) -> None:
        self.blocks, self.block_bytes = len(pool), pool[0].nbytes

    def close(self) -> None: ...


def unpinned(make: Any) -> Any:
    def made(*size: Any, pin_memory: bool = False, **more: Any) -> torch.Tensor:
        return make(*size, **more)

    return made


def pretend_a_device(monkeypatch: pytest.MonkeyPatch, sizes: list[MixedSize]) -> None:
    """Steps with chunks are filled up to these sizes, as if they had been captured."""
    for name in ("Stream", "Event"):
        monkeypatch.setattr(torch.cuda, name, Now)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "interpreter")
    for name in ("empty", "zeros"):
        monkeypatch.setattr(torch, name, unpinned(getattr(torch, name)))
    monkeypatch.setattr(pool_module, "CudaBlocks", Unmoved)
    monkeypatch.setattr(executor_module, "warm_up", lambda *_: None)
    monkeypatch.setattr(ModelRunner, "capture", lambda *_: None)
    monkeypatch.setattr(ModelRunner, "capture_mixed", lambda runner, _: runner.fill_up_to(sizes))
