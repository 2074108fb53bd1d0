"""Copies blocks of a KV pool on a CUDA device to and from the host; implements `contract.DeviceBlocks`.

Each calling thread has a CUDA stream of its own, beside the stream that computes, and two pinned buffers. A call copies in
one of two ways:

    straight   one copy per block between device and row, when the row is pinned and a piece is at least STRAIGHT_BYTES
    bounced    many pieces are gathered on the device into one run, copied into a pinned buffer and scattered by the CPU;
               two buffers alternate, so that one is copied while the other is scattered

Nothing is ordered against the stream that computes. The caller owns the blocks: the host has seen the end of every step
that wrote or read them. Blocks of another process on the same device are read and hashed there (`CudaRemoteBlocks`).
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import threading
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from baton.core.engine.plan import Int32s
from baton.core.errors import InvariantViolated
from baton.executor.cuda.sharing import SharedMapping, ipc_name, open_ipc_name

log = logging.getLogger(__name__)

RUN_BYTES = 64 << 20
"""In one call: more than a millisecond at the speed of the bus, against tens of microseconds to begin and end it."""
BOUNCE_BYTES = 16 << 20
"""Of each of a thread's two buffers, unless a block is longer."""
STRAIGHT_BYTES = 256 << 10
"""From here on a piece is worth a copy of its own."""
PIECES_MAX = 4096
"""In one bounce."""

Bytes = npt.NDArray[np.uint8]
_WORDS = (torch.int64, torch.int32, torch.int16)
_STRIDE = 0x3C6EF372FE94F82A
"""Even, so that one more than any multiple of it is odd."""


class CudaBlocks:
    def __init__(self, pool: torch.Tensor, run_bytes: int = RUN_BYTES) -> None:
        """`pool` is [blocks, …], contiguous, of whatever numbers; it must outlive every call."""
        if not pool.is_cuda or not pool.is_contiguous():
            raise InvariantViolated(f"a pool on {pool.device} with strides {pool.stride()} is none to copy from")
        self._pool = pool.view(len(pool), -1).view(torch.uint8)
        self.blocks, self.block_bytes = self._pool.shape
        self.run_bytes = run_bytes
        self._streams = _ThreadStreams()
        self._pinned: list[Bytes] = []
        """What was registered with the driver: it must be told before the memory goes."""

    def read(self, blocks: Int32s, rows: Int32s, host: Bytes, begin: int, end: int) -> None:
        if len(blocks) and end > begin:
            copier = self._copy_stream()
            with torch.inference_mode(), torch.cuda.stream(copier.stream):
                if _goes_straight(host, end - begin):
                    self._read_straight(copier, blocks, rows, host, begin, end)
                else:
                    self._read_bounced(copier, blocks, rows, host, begin, end)

    def write(self, blocks: Int32s, rows: Int32s, host: Bytes, begin: int, end: int) -> None:
        if len(blocks) and end > begin:
            copier = self._copy_stream()
            with torch.inference_mode(), torch.cuda.stream(copier.stream):
                if _goes_straight(host, end - begin):
                    self._write_straight(copier, blocks, rows, host, begin, end)
                else:
                    self._write_bounced(copier, blocks, rows, host, begin, end)

    def allocate(self, size: int) -> Bytes:
        """Pinned, and mapped at once; where the driver refuses, plain memory, which is bounced."""
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # not every kernel has them
            memory.madvise(mmap.MADV_HUGEPAGE)  # fewer pages to pin
        array: Bytes = np.frombuffer(memory, dtype=np.uint8)
        error = int(_runtime().cudaHostRegister(array.ctypes.data, size, 0))
        if error:
            log.warning("%d bytes of host memory cannot be pinned (CUDA error %d); copies will be slower", size, error)
        else:
            self._pinned.append(array)
        return array

    def share(self) -> bytes:
        copier = self._copy_stream()
        with torch.cuda.stream(copier.stream):
            copier.wait()  # the driver's own calls need a thread that has met the device
            name = ipc_name(self._pool)
        if not name:
            log.warning("the KV pool cannot be shared with other processes; they get it through host memory")
        return name

    def open(self, handle: bytes, blocks: int) -> CudaRemoteBlocks | str:
        copier = self._copy_stream()
        with torch.cuda.stream(copier.stream):
            copier.wait()
            opened = open_ipc_name(handle, blocks * self.block_bytes, self._pool.device)
            return (
                opened
                if isinstance(opened, str)
                else CudaRemoteBlocks(self, opened, opened.tensor(blocks, self._pool.device))
            )

    def digests(self, blocks: Int32s, spans: Sequence[tuple[int, int]]) -> npt.NDArray[np.uint64]:
        """The sum of the words of a piece, each times an odd number of its place: no one word can change unseen."""
        copier = self._copy_stream()
        with torch.inference_mode(), torch.cuda.stream(copier.stream):
            sums = torch.zeros(len(spans), len(blocks), dtype=torch.int64, device=self._pool.device)
            for row, (begin, end) in zip(sums, spans, strict=True):
                for gathered, part in self._gathered(copier, self._words(self._pool, begin, end), blocks, end - begin):
                    places = torch.arange(gathered.shape[1], device=gathered.device) * _STRIDE + 1
                    row[part] = (gathered.to(torch.int64) * places).sum(dim=1)
            return sums.cpu().numpy().view(np.uint64)

    def pull(self, theirs: torch.Tensor, sources: Int32s, targets: Int32s, begin: int, end: int) -> None:
        """Bytes [begin, end) of block `sources[i]` of another pool on this device into our block `targets[i]`."""
        copier = self._copy_stream()
        with torch.inference_mode(), torch.cuda.stream(copier.stream):
            ours = self._words(self._pool, begin, end)
            for bounce, part in copier.turns(len(sources), end - begin):
                bounce.event.synchronize()
                count = part.stop - part.start
                names = bounce.name(np.concatenate([sources[part], targets[part]]))
                staged = bounce.pieces(count, end - begin, ours.dtype)
                torch.index_select(self._words(theirs, begin, end), 0, names[:count], out=staged)
                ours.index_copy_(0, names[count:], staged)
                bounce.event.record()
            copier.wait()

    def close_window(self, opened: SharedMapping) -> None:
        copier = self._copy_stream()
        with torch.cuda.stream(copier.stream):
            copier.wait()
            opened.close()

    def close(self) -> None:
        """Nobody copies any more."""
        for array in self._pinned:
            _runtime().cudaHostUnregister(array.ctypes.data)
        self._pinned.clear()

    # ── a copy for each block ────────────────────────────────────────────────────────────────────────────────────────────

    def _read_straight(self, copier: _CopyStream, blocks: Int32s, rows: Int32s, host: Bytes, begin: int, end: int) -> None:
        target = torch.from_numpy(host)
        for block, row in zip(blocks.tolist(), rows.tolist(), strict=True):
            target[row, begin:end].copy_(self._pool[block, begin:end], non_blocking=True)
        copier.wait()

    def _write_straight(self, copier: _CopyStream, blocks: Int32s, rows: Int32s, host: Bytes, begin: int, end: int) -> None:
        source = torch.from_numpy(host)
        for block, row in zip(blocks.tolist(), rows.tolist(), strict=True):
            self._pool[block, begin:end].copy_(source[row, begin:end], non_blocking=True)
        copier.wait()

    # ── through the buffers ──────────────────────────────────────────────────────────────────────────────────────────────

    def _read_bounced(self, copier: _CopyStream, blocks: Int32s, rows: Int32s, host: Bytes, begin: int, end: int) -> None:
        pool, size = self._words(self._pool, begin, end), end - begin
        coming: _Coming | None = None
        for bounce, part in copier.turns(len(blocks), size):
            names = bounce.name(blocks[part])
            torch.index_select(pool, 0, names, out=bounce.pieces(len(names), size, pool.dtype))
            whole = len(names) * size
            bounce.pinned[:whole].copy_(bounce.staged[:whole], non_blocking=True)
            bounce.event.record()
            if coming is not None:
                coming.take_apart(host, begin, end)
            coming = _Coming(bounce, rows[part])
        if coming is not None:
            coming.take_apart(host, begin, end)

    def _write_bounced(self, copier: _CopyStream, blocks: Int32s, rows: Int32s, host: Bytes, begin: int, end: int) -> None:
        pool, size = self._words(self._pool, begin, end), end - begin
        for bounce, part in copier.turns(len(blocks), size):
            bounce.event.synchronize()  # what it brought last has left it
            for at, row in enumerate(rows[part].tolist()):
                bounce.bytes[at * size : (at + 1) * size] = host[row, begin:end]
            names = bounce.name(blocks[part])
            whole = len(names) * size
            bounce.staged[:whole].copy_(bounce.pinned[:whole], non_blocking=True)
            pool.index_copy_(0, names, bounce.pieces(len(names), size, pool.dtype))
            bounce.event.record()
        copier.wait()

    @staticmethod
    def _gathered(
        copier: _CopyStream, pool: torch.Tensor, blocks: Int32s, size: int
    ) -> Iterator[tuple[torch.Tensor, slice]]:
        """Pieces of these blocks, some at a time, each [pieces, words] until the next."""
        for bounce, part in copier.turns(len(blocks), size):
            bounce.event.synchronize()
            names = bounce.name(blocks[part])
            gathered = bounce.pieces(len(names), size, pool.dtype)
            yield torch.index_select(pool, 0, names, out=gathered), part
            bounce.event.record()

    def _words(self, pool: torch.Tensor, begin: int, end: int) -> torch.Tensor:
        """[blocks, …]: these bytes of every block of a pool like ours, in the longest words that they consist of."""
        part = pool[:, begin:end]
        for dtype in _WORDS:
            if not (begin | end | self.block_bytes) % dtype.itemsize:
                return part.view(dtype)
        return part

    def _copy_stream(self) -> _CopyStream:
        """This thread's own."""
        if self._streams.copier is None:
            self._streams.copier = _CopyStream(self._pool.device, max(BOUNCE_BYTES, self.block_bytes))
        return self._streams.copier


class CudaRemoteBlocks:
    """The pool of another process on our device."""

    def __init__(self, ours: CudaBlocks, opened: SharedMapping, theirs: torch.Tensor) -> None:
        self._ours = ours
        self._opened = opened
        self._theirs = theirs

    def pull(self, sources: Int32s, targets: Int32s, begin: int, end: int) -> None:
        self._ours.pull(self._theirs, sources, targets, begin, end)

    def close(self) -> None:
        self._ours.close_window(self._opened)


class _ThreadStreams(threading.local):
    copier: _CopyStream | None = None


class _CopyStream:
    """A stream and two bounces, of one thread."""

    def __init__(self, device: torch.device, bounce_bytes: int) -> None:
        self.stream = torch.cuda.Stream(device)
        self._done = _quiet_event()
        with torch.cuda.stream(self.stream):  # so that the memory is this stream's from the start
            self._bounces = tuple(_Bounce(device, bounce_bytes) for _ in range(2))
        self._bounce_bytes = bounce_bytes

    def turns(self, count: int, size: int) -> Iterator[tuple[_Bounce, slice]]:
        """Which pieces go through which bounce, one after the other."""
        at_once = min(PIECES_MAX, self._bounce_bytes // max(1, size))
        for turn, begin in enumerate(range(0, count if size else 0, at_once)):
            yield self._bounces[turn % 2], slice(begin, min(count, begin + at_once))

    def wait(self) -> None:
        """For everything so far on its stream, which is the current one."""
        self._done.record()
        self._done.synchronize()


class _Bounce:
    """A pinned buffer, its counterpart on the device, and the names of the blocks whose pieces they hold."""

    def __init__(self, device: torch.device, size: int) -> None:
        self.pinned = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        self.bytes: Bytes = self.pinned.numpy()
        self.staged = torch.empty(size, dtype=torch.uint8, device=device)
        self.event = _quiet_event()
        self._names = torch.empty(2 * PIECES_MAX, dtype=torch.int64, pin_memory=True)
        self._names_there = torch.empty(2 * PIECES_MAX, dtype=torch.int64, device=device)

    def pieces(self, count: int, size: int, dtype: torch.dtype) -> torch.Tensor:
        """[pieces, words] of what is staged on the device."""
        return self.staged[: count * size].view(dtype).view(count, -1)

    def name(self, blocks: Int32s) -> torch.Tensor:
        """The ids of these blocks, on the device. Whoever asks has waited for what they named before."""
        count = len(blocks)
        self._names.numpy()[:count] = blocks
        self._names_there[:count].copy_(self._names[:count], non_blocking=True)
        return self._names_there[:count]


class _Coming(NamedTuple):
    """On its way into a bounce."""

    bounce: _Bounce
    rows: Int32s

    def take_apart(self, host: Bytes, begin: int, end: int) -> None:
        self.bounce.event.synchronize()
        size = end - begin
        for at, row in enumerate(self.rows.tolist()):
            host[row, begin:end] = self.bounce.bytes[at * size : (at + 1) * size]


class _Runtime(Protocol):
    """What we use of CUDA's. Zero is success."""

    def cudaHostRegister(self, pointer: int, size: int, flags: int) -> int: ...  # noqa: N802
    def cudaHostUnregister(self, pointer: int) -> int: ...  # noqa: N802


def _runtime() -> _Runtime:
    runtime: _Runtime = torch.cuda.cudart()
    return runtime


def _quiet_event() -> torch.cuda.Event:
    """One that is waited for without keeping a core busy."""
    return torch.cuda.Event(blocking=True)


def _goes_straight(host: Bytes, size: int) -> bool:
    return size >= STRAIGHT_BYTES and torch.from_numpy(host).is_pinned()
