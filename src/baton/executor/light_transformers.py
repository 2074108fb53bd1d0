"""Keeps `transformers` from importing the parts of torch that only compile or distribute a model.

Those are `torch._dynamo`, `torch.distributed.tensor` and what they import (sympy, triton, the inductor): half of the time
that the first import of a model class takes, and nothing of theirs runs on a CPU. While `transformers` is imported and makes
a model, torch says that it has no distributed package, as builds without one do, and modules stand in for the others that
have the few names asked for in passing: decorators that change nothing, and classes and checks for symbolic sizes, which no
size here is. If another name is asked for, the work is done again with all of torch. Afterwards whoever asks for one of them
imports it.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import operator
import sys
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import TypeVar
from unittest.mock import patch

import torch
import torch.compiler
import torch.distributed

log = logging.getLogger(__name__)

PACKAGE = "transformers"
NEEDED = (f"{PACKAGE}.modeling_utils", f"{PACKAGE}.masking_utils", f"{PACKAGE}.modeling_layers")
COMPILER = "torch._dynamo"
TRACED = f"{COMPILER}._trace_wrapped_higher_order_op"

T = TypeVar("T")


def import_transformers() -> None:
    """Has an effect if it comes before all other imports of `transformers`."""
    if NEEDED[0] not in sys.modules:
        without_compiler(_import_needed)


def without_compiler(work: Callable[[], T]) -> T:
    """What `work` returns; it is called again if it fails because it needs more than the stand-ins have."""
    if COMPILER in sys.modules:
        return work()
    missed: list[str] = []
    try:
        with _stood_in(missed.append):
            return work()
    except Exception:
        if not missed:
            raise
    log.info("all of torch is imported, for %s", missed[0])
    return work()


def _import_needed() -> None:
    try:
        for name in NEEDED:
            importlib.import_module(name)
    except Exception:
        for name in [name for name in sys.modules if name.partition(".")[0] == PACKAGE]:
            del sys.modules[name]
        raise


class _NoSymbol:
    """A class of sympy's that nothing is an instance of."""


def _unchanged(function: Callable[..., object] | None = None, *_: object, **__: object) -> Callable[..., object]:
    """A decorator, with or without arguments, that does nothing."""
    return _unchanged if function is None else function


def _real_transform() -> object:
    """Used by masks of another kind than ours, long after."""
    return importlib.import_module(TRACED).TransformGetItemToIndex()


def _always(_: int) -> bool:
    return True


def _never(_: int) -> bool:
    return False


def _all(*conditions: bool) -> bool:
    return all(conditions)


def _any(*conditions: bool) -> bool:
    return any(conditions)


NAMES: Mapping[str, Mapping[str, object]] = {
    COMPILER: dict.fromkeys(("disable", "allow_in_graph", "assume_constant_result"), _unchanged),
    TRACED: {"TransformGetItemToIndex": _real_transform},
    "sympy": {"Basic": _NoSymbol},
    "torch.fx.experimental.symbolic_shapes": {
        "expect_true": bool,
        "guard_or_false": bool,
        "guard_or_true": bool,
        "guard_size_oblivious": bool,
        "statically_known_true": bool,
        "guarding_hint_or_throw": int,
        "has_guarding_hint": _always,
        "is_nested_int": _never,
        "sym_and": _all,
        "sym_or": _any,
        "sym_eq": operator.eq,
    },
}
"""What each stand-in has. The checks are of sizes, each of which is a number here."""


class _StandIn(ModuleType):
    """Has a few names of a module, until it is retired: then whoever kept it gets those of the real one."""

    def __init__(self, name: str, names: Mapping[str, object], on_miss: Callable[[str], None]) -> None:
        super().__init__(name)
        self._on_miss: Callable[[str], None] | None = on_miss
        self._names = names
        vars(self).update(names)

    def __getattr__(self, name: str) -> object:
        if self._on_miss is None:
            return vars(importlib.import_module(self.__name__))[name]
        if not name.startswith("__"):
            self._on_miss(f"{self.__name__}.{name}")
        raise AttributeError(f"the stand-in for {self.__name__} has no {name}")

    def retire(self) -> None:
        self._on_miss = None
        for name in self._names:
            del vars(self)[name]


@contextlib.contextmanager
def _stood_in(on_miss: Callable[[str], None]) -> Iterator[None]:
    stand_ins = {name: _StandIn(name, names, on_miss) for name, names in NAMES.items() if name not in sys.modules}
    sys.modules.update(stand_ins)
    try:
        with (
            patch.object(torch, "_dynamo", stand_ins[COMPILER], create=True),
            patch.object(torch.compiler, "disable", _unchanged),
            patch.object(torch.distributed, "is_available", bool),
        ):
            yield
    finally:
        for name, stand_in in stand_ins.items():
            if sys.modules.get(name) is stand_in:
                del sys.modules[name]
            stand_in.retire()
