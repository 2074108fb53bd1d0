"""A copy of everything that may change behind an object, taken within a turn of an engine and encoded later.

    state = capture(worker)          milliseconds: one shallow copy an object, arrays as they are in memory
    data  = encode_state(state)      the bytes of `snapshot(worker)` at that moment; in any thread, at any later time

What never changes is referred to, not copied: numbers, text, members of enums, arrays that cannot be written, and frozen
Structs of such values.
"""

from __future__ import annotations

import enum
import functools
import operator
import typing
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass, field
from types import BuiltinFunctionType, FunctionType, MethodType, NoneType, UnionType
from typing import Any

import msgspec
import numpy as np

from baton.core.content_hashes import ContentHashes
from baton.wire.snapshot import (
    DICTS,
    MODULES,
    SCALARS,
    CannotSnapshot,
    GraphEncoder,
    Masking,
    chooses_fields,
    fields_of,
    slots_of,
)

OBJECT_BYTES = 100
ITEM_BYTES = 8
"""Estimated sizes in a snapshot."""
LONG_LIST = 1024

Copier = Callable[[Any, list[Any]], Any]
"""Copies an object, and adds what it refers to."""
_unchanging: set[type] = set(SCALARS)
"""Classes whose instances never change, nor anything behind them."""


@dataclass(slots=True, eq=False)
class CapturedState:
    root: object
    known_plain: Set[int] = frozenset()
    """Lists that need not be looked through."""
    contents: dict[int, Any] = field(default_factory=dict)
    """Id of an object → what it contained."""
    estimated_bytes: int = 0
    """Of its snapshot."""
    plain_lists: set[int] = field(default_factory=set)
    """Ids of long lists of what never changes: a pool has some, and looking through them takes long."""
    _kept: list[object] = field(default_factory=list)
    """The objects: an id names one only while it lives."""

    def take(self) -> None:
        waiting, contents, keep, copiers = [self.root], self.contents, self._kept.append, self._copiers()
        while waiting:
            value = waiting.pop()
            number = id(value)
            if number in contents:
                continue
            kind = type(value)
            copier = copiers.get(kind)
            if copier is None:
                copier = copiers[kind] = self._copier_of(kind)
            keep(value)
            contents[number] = copier(value, waiting)
        self.estimated_bytes += OBJECT_BYTES * len(contents)

    def _copiers(self) -> dict[type, Copier]:
        kinds: tuple[type, ...] = (*DICTS, defaultdict)
        return {
            **dict.fromkeys(kinds, self._dict),
            list: self._list,
            deque: self._items,
            set: self._items,
            tuple: _tuple,
            np.ndarray: self._array,
        }

    def _copier_of(self, kind: Any) -> Copier:
        if _is_unchanging(kind):
            _unchanging.add(kind)
            return _nothing
        if issubclass(kind, tuple | frozenset):
            return _tuple
        if issubclass(kind, bytearray):
            return self._items
        if issubclass(kind, MethodType | BuiltinFunctionType):
            return _owner
        if not kind.__module__.startswith(MODULES):
            raise CannotSnapshot(f"a {kind.__module__}.{kind.__qualname__} cannot be in a snapshot")
        return _fields_copier(kind)

    def _list(self, value: list[Any], waiting: list[Any]) -> Any:
        if len(value) < LONG_LIST:
            return self._items(value, waiting) if value else []
        if id(value) in self.known_plain or _unchanging.issuperset(map(type, value)):
            self.plain_lists.add(id(value))
            self.estimated_bytes += ITEM_BYTES * len(value)
            return value.copy()
        return self._items(value, waiting)

    def _items(self, value: Any, waiting: list[Any]) -> Any:
        self.estimated_bytes += ITEM_BYTES * len(value)
        _visit(value, waiting)
        return value.copy()

    def _dict(self, value: dict[Any, Any], waiting: list[Any]) -> Any:
        self.estimated_bytes += 2 * ITEM_BYTES * len(value)
        _visit(value, waiting)
        _visit(value.values(), waiting)
        return value.copy()

    def _array(self, value: Any, _: list[Any]) -> Any:
        if value.dtype.hasobject:
            raise CannotSnapshot("an array of objects cannot be in a snapshot")
        self.estimated_bytes += value.nbytes
        if not value.flags.writeable and value.base is None:
            return value
        copied = value.copy()
        copied.setflags(write=value.flags.writeable)
        return copied


def capture(root: object, previous: CapturedState | None = None) -> CapturedState:
    """`previous`: of the same object earlier; what was found in it is not looked for again. Raises CannotSnapshot."""
    state = CapturedState(root, frozenset() if previous is None else previous.plain_lists)
    state.take()
    return state


def encode_state(state: CapturedState, masking: Masking | None = None) -> bytes:
    """The snapshot. Raises CannotSnapshot."""
    return GraphEncoder(masking, contents=state.contents).encode(state.root)


def _visit(items: Iterable[Any], waiting: list[Any]) -> None:
    if _unchanging.issuperset(map(type, items)):
        return
    for item in items:
        kind = type(item)
        # Entries of a heap or a queue are tuples: mostly plain, and many.
        if kind not in _unchanging and not (kind is tuple and _unchanging.issuperset(map(type, item))):
            waiting.append(item)


def _tuple(value: Any, waiting: list[Any]) -> Any:
    _visit(value, waiting)
    return value


def _nothing(value: Any, _: list[Any]) -> Any:
    return value


def _owner(value: Any, waiting: list[Any]) -> Any:
    waiting.append(value.__self__)
    return value


def _fields(value: Any, waiting: list[Any]) -> tuple[tuple[str, ...], Sequence[Any]]:
    names, items = fields_of(value)
    waiting += [item for item in items if type(item) not in _unchanging]
    return names, items


@functools.cache
def _fields_copier(kind: Any) -> Copier:
    """There are thousands of requests, whose class has slots: what is the same for all of them is looked up once."""
    names = slots_of(kind)
    if chooses_fields(kind) or kind.__dictoffset__ or len(names) < 2:
        return _fields
    get = operator.attrgetter(*names)

    def copy(value: Any, waiting: list[Any]) -> tuple[tuple[str, ...], Sequence[Any]]:
        try:
            items = get(value)
        except AttributeError:  # a slot is not set
            return _fields(value, waiting)
        if not _unchanging.issuperset(map(type, items)):
            waiting += [item for item in items if type(item) not in _unchanging]
        return names, items

    return copy


# ── what never changes ───────────────────────────────────────────────────────────────────────────────────────────────────

_LEAVES = (*SCALARS, NoneType, np.generic, enum.Enum)


def _is_unchanging(kind: Any) -> bool:
    if issubclass(kind, msgspec.Struct):
        return _is_unchanging_struct(kind)
    return issubclass(kind, (*_LEAVES, FunctionType, type, ContentHashes))


@functools.cache
def _is_unchanging_struct(kind: Any) -> bool:
    """Whether it is frozen, and all of its fields are of types that do not change either."""
    return bool(kind.__struct_config__.frozen) and all(map(_never_changes, typing.get_type_hints(kind).values()))


def _never_changes(hint: Any) -> bool:
    if isinstance(hint, typing.NewType):
        return _never_changes(hint.__supertype__)
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (tuple, typing.Union, UnionType):
        return all(_never_changes(part) for part in inner if part is not ...)
    kind = origin or hint
    if not isinstance(kind, type):
        return origin is typing.Literal
    if issubclass(kind, msgspec.Struct):
        return _is_unchanging_struct(kind)
    return issubclass(kind, (*_LEAVES, np.ndarray))
