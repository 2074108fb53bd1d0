"""Snapshots of deciding objects: the whole graph of objects behind a Worker or a Router as bytes, and back.

    data = snapshot(worker)                   pure: changes nothing, needs no clock
    twin = restore(data, worker.hashes)       decides as `worker` would have from that moment on

Generic: a class needs nothing to be in a snapshot, and a new field is in it by itself. Shared references, cycles and
the order of dictionaries are kept; sets are written in order of their members. Not in a snapshot are the
ContentHashes, which hold a secret: `restore` is given some. A class
that keeps more memory than it uses, or what only asking it changes (a cache), implements `HasSnapshotFields`.

A snapshot is no pickle: classes come from `baton.core` and `baton.wire` only, no constructor and no method is called while
one is read, and bytes that are no snapshot raise BadSnapshot.

    bytes     = msgpack of (FORMAT, classes, root, bodies)
    a class   = (module, name, names of its fields)
    a body    = the contents of one object of the graph; the others refer to it by its number
    a value   = a number, text, bytes, None, or [kind, …]: a reference, a tuple, a member of an enum …

`encode_value` writes values without identity (events and effects): what is shared is written as often as it is referred to.
"""

from __future__ import annotations

import enum
import functools
import importlib
import operator
import re
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, zip_longest
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, Protocol, runtime_checkable

import msgspec
import numpy as np
import numpy.typing as npt

from baton.core.content_hashes import ContentHashes
from baton.core.errors import BatonError

FORMAT = 1
MODULES = ("baton.core.", "baton.wire.")
"""Where classes of a snapshot may come from."""
DEPTH_MAX = 200
"""Of values within values."""
BIG_INT_BYTES_MAX = 4096

_INT64_MIN, _INT64_END = -(1 << 63), 1 << 63
_AS_THEY_ARE = frozenset({type(None), bool, float, str, bytes})
SCALARS = frozenset({type(None), bool, int, float, str, bytes})
_VIEWS = frozenset({"keys", "values", "items", "get"})
"""Methods of built-in containers that an object may keep."""
_DTYPE = re.compile(r"[<>|][biufc][0-9]{1,2}")
"""Of an array of numbers, as numpy writes it."""
DICTS: tuple[type[dict[Any, Any]], ...] = (dict, OrderedDict, Counter)


class BadSnapshot(BatonError):
    """Bytes that are no snapshot, or one of other classes than these."""


class CannotSnapshot(BatonError):
    """An object that a snapshot cannot hold."""


class Kind(enum.IntEnum):
    """Of a value or a body: the first element of its list."""

    REFERENCE = 0
    TUPLE = 1
    NAMED_TUPLE = 2
    ENUM = 3
    BIG_INT = 4
    NUMPY_SCALAR = 5
    HASHES = 6
    METHOD = 7
    FUNCTION = 8
    CLASS = 9
    BODY = 10
    """A body in the place of a value, where identity does not matter."""
    ABSENT = 11
    """A slot that is not set."""
    FROZEN_SET = 12
    CONSTANT = 13
    """A value with a name in upper case in one of our modules: referred to by it, and the same object afterwards."""
    LIST = 20
    PLAIN_LIST = 21
    TUPLE_LIST = 22
    DICT = 23
    PLAIN_DICT = 24
    SET = 25
    DEQUE = 26
    ARRAY = 27
    OBJECT = 28
    STRUCT = 29
    BYTE_ARRAY = 30


@runtime_checkable
class HasSnapshotFields(Protocol):
    """Chooses the fields of its snapshot itself."""

    def snapshot_fields(self) -> dict[str, object]: ...

    def restore_fields(self, fields: dict[str, object]) -> None: ...


class Masking(Protocol):
    """Replaces what a recording must not show. A mark says what a field holds; items of a container have its mark."""

    def mark_of(self, owner: type, field: str, mark: object) -> object:
        """The mark of a field of an object; of a method's arguments with `field` the position."""

    def scalar(self, value: object, mark: object) -> object: ...

    def array(self, value: npt.NDArray[Any], mark: object) -> npt.NDArray[Any]: ...


def snapshot(root: object) -> bytes:
    """The object and everything it refers to. Raises CannotSnapshot."""
    return GraphEncoder(None).encode(root)


def restore(data: bytes, hashes: ContentHashes) -> Any:
    """A new object like the one that was written. Raises BadSnapshot."""
    return GraphDecoder(data, hashes).root()


def state_of(root: object) -> bytes:
    """A snapshot for comparing: equal if and only if the objects are, whichever of their unchanging values they share."""
    return GraphEncoder(None, shares_values=False).encode(root)


def encode_value(value: object, masking: Masking | None = None, mark: object = None) -> bytes:
    return ValueEncoder(masking).encode(value, mark)


def encode_arguments(values: Sequence[object], masking: Masking | None, marks: Sequence[object]) -> bytes:
    """The arguments of a call, with what they share; the marks of the first ones."""
    return GraphEncoder(masking).encode_each(values, marks)


def decode_value(data: bytes) -> Any:
    """What `encode_value` or `encode_arguments` wrote."""
    return GraphDecoder(data, None).root()


def first_difference(one: bytes, other: bytes) -> str:
    """Where two snapshots differ first: the class and field, and both values."""
    (_, classes, _, ours), (_, _, _, its) = msgspec.msgpack.decode(one), msgspec.msgpack.decode(other)
    for number, (left, right) in enumerate(zip(ours, its, strict=False)):
        if left == right:
            continue
        if left[0] != Kind.OBJECT or right[0] != Kind.OBJECT or left[1] != right[1]:
            where = [f"{classes[b[1]][1]}.{n}" for b in ours if b[0] in (Kind.OBJECT, Kind.STRUCT)
                     for n, v in zip(classes[b[1]][2], b[2:], strict=True) if v == [Kind.REFERENCE, number]]  # fmt: skip
            return f"{' '.join(where)}: {left!r:.500} and {right!r:.500}"
        _, name, fields = classes[left[1]]
        pairs = zip(fields, left[2:], right[2:], strict=True)
        return ", ".join(f"{name}.{field}: {a!r:.500} and {b!r:.500}" for field, a, b in pairs if a != b)
    return f"{len(ours)} and {len(its)} objects"


_BY_REFERENCE: set[type] = set()
"""Classes of which an object was written by reference: of another object of the class, no other question is asked."""


# ── writing ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


class ValueEncoder:
    """Writes values in place of references."""

    def __init__(self, masking: Masking | None) -> None:
        self._masking = masking
        self._classes: dict[tuple[type, tuple[str, ...]], int] = {}
        self._bodies: list[list[Any]] = []

    def encode(self, root: object, mark: object = None) -> bytes:
        return self._written(self._value(root, mark))

    def _written(self, root: object) -> bytes:
        classes = [(kind.__module__, kind.__qualname__, names) for kind, names in self._classes]
        try:
            return msgspec.msgpack.encode((FORMAT, classes, root, self._bodies))
        except (TypeError, ValueError, OverflowError) as error:
            raise CannotSnapshot(f"a value cannot be written: {error}") from None

    def _value(self, value: Any, mark: object) -> Any:
        kind = type(value)
        if kind in SCALARS:
            return self._scalar(value, mark)
        if kind is tuple:
            return [Kind.TUPLE, *[self._value(item, mark) for item in value]]
        if kind in _BY_REFERENCE:
            return self._reference(value, mark)
        if value is _ABSENT:
            return [Kind.ABSENT]
        if isinstance(value, enum.Enum):
            return [Kind.ENUM, self._class_of(kind, ()), value.name]
        if isinstance(value, tuple):
            names = kind._fields
            return [Kind.NAMED_TUPLE, self._class_of(kind, names), *self._fields(kind, names, value, mark)]
        if isinstance(value, ContentHashes):
            return [Kind.HASHES]
        if kind is frozenset:
            return [Kind.FROZEN_SET, *_in_order(self._value(item, mark) for item in value)]
        if isinstance(value, np.generic):
            masked = value if self._masking is None else self._masking.array(np.array([value]), mark)[0]
            return [Kind.NUMPY_SCALAR, value.dtype.str, masked.tobytes()]
        if isinstance(value, MethodType | BuiltinFunctionType):
            return self._written_method(value)
        if isinstance(value, FunctionType):
            return [Kind.FUNCTION, _checked_module(value.__module__), value.__qualname__]
        if isinstance(value, type):
            return [Kind.CLASS, self._class_of(value, ())]
        _BY_REFERENCE.add(kind)
        return self._reference(value, mark)

    def _reference(self, value: object, mark: object) -> list[Any]:
        return [Kind.BODY, self._body(value, mark)]

    def _scalar(self, value: Any, mark: object) -> Any:
        if self._masking is not None:
            value = self._masking.scalar(value, mark)
        if type(value) is int and not _INT64_MIN <= value < _INT64_END:
            return [Kind.BIG_INT, value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)]
        return value

    def _written_method(self, value: Any) -> list[Any]:
        owner, name = value.__self__, value.__name__
        if owner is None or (isinstance(value, BuiltinFunctionType) and name not in _VIEWS):
            raise CannotSnapshot(f"{value!r} cannot be in a snapshot")
        return [Kind.METHOD, self._value(owner, None), name]

    def _fields(self, kind: type, names: tuple[str, ...], items: Iterable[Any], mark: object) -> list[Any]:
        masking = self._masking
        if masking is None:
            return [
                item if type(item) in _AS_THEY_ARE or (type(item) is int and _INT64_MIN <= item < _INT64_END)
                else self._value(item, mark)
                for item in items
            ]  # fmt: skip
        return [self._value(item, masking.mark_of(kind, name, mark)) for name, item in zip(names, items, strict=True)]

    def _class_of(self, kind: type, names: tuple[str, ...]) -> int:
        found = self._classes.get((kind, names))
        if found is None:
            _checked_module(kind.__module__)
            found = self._classes[kind, names] = len(self._classes)
        return found

    # ── bodies ───────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _body(self, value: Any, mark: object) -> list[Any]:
        kind = type(value)
        if kind is list:
            return self._list_body(self._contents_of(value), mark)
        if isinstance(value, dict):
            return self._dict_body(self._contents_of(value), mark)
        if kind is np.ndarray:
            return self._array_body(self._contents_of(value), mark)
        if kind is deque:
            return [Kind.DEQUE, value.maxlen, *[self._value(item, mark) for item in self._contents_of(value)]]
        if kind is set:
            return [Kind.SET, *_in_order(self._value(item, mark) for item in self._contents_of(value))]
        if kind is bytearray:
            return [Kind.BYTE_ARRAY, self._scalar(bytes(self._contents_of(value)), mark)]
        if not kind.__module__.startswith(MODULES):
            raise CannotSnapshot(f"a {kind.__module__}.{kind.__qualname__} cannot be in a snapshot")
        captured = self._contents_of(value)
        names, items = fields_of(value) if captured is value else captured
        body_kind = Kind.STRUCT if isinstance(value, msgspec.Struct) else Kind.OBJECT
        return [body_kind, self._class_of(kind, names), *self._fields(kind, names, items, None)]

    def _contents_of(self, value: Any) -> Any:
        """What is in the object, or was at the moment that is written: the object itself, a copy, or names and fields."""
        return value

    def _list_body(self, items: list[Any], mark: object) -> list[Any]:
        # A pool has lists of as many items as blocks: what is plain is written as it is.
        kinds = set(map(type, items))
        if kinds <= SCALARS and _fit(items, kinds):
            return [Kind.PLAIN_LIST, self._plain(items, mark)]
        if kinds == {tuple}:
            inner = set(map(type, chain.from_iterable(items)))
            if inner <= SCALARS and _fit([*chain.from_iterable(items)], inner):
                return [Kind.TUPLE_LIST, items if self._masking is None else [self._plain(item, mark) for item in items]]
        return [Kind.LIST, *[self._value(item, mark) for item in items]]

    def _plain(self, items: Iterable[Any], mark: object) -> Any:
        return items if self._masking is None else [self._masking.scalar(item, mark) for item in items]

    def _dict_body(self, items: dict[Any, Any], mark: object) -> list[Any]:
        kind = type(items)
        which: Any = DICTS.index(kind) if kind in DICTS else None
        if kind is defaultdict:
            which = self._value(items.default_factory, None)  # type: ignore[attr-defined]
        elif which is None:
            raise CannotSnapshot(f"a {kind.__module__}.{kind.__qualname__} cannot be in a snapshot")
        kinds = set(map(type, items)) | set(map(type, items.values()))
        if kinds <= SCALARS and _fit([*items, *items.values()], kinds):
            return [Kind.PLAIN_DICT, which, self._plain(list(items), mark), self._plain(list(items.values()), mark)]
        pairs = [self._value(item, mark) for pair in items.items() for item in pair]
        return [Kind.DICT, which, *pairs]

    def _array_body(self, value: npt.NDArray[Any], mark: object) -> list[Any]:
        if value.dtype.hasobject:
            raise CannotSnapshot("an array of objects cannot be in a snapshot")
        masked = value if self._masking is None else self._masking.array(value, mark)
        return [Kind.ARRAY, masked.dtype.str, list(masked.shape), masked.tobytes(), self._is_writeable(value)]

    def _is_writeable(self, _: npt.NDArray[Any]) -> bool:
        return False


class GraphEncoder(ValueEncoder):
    """Writes each object once. The bodies are written one after the other, not one within the other: a graph may be deep."""

    def __init__(
        self, masking: Masking | None, shares_values: bool = True, contents: Mapping[int, Any] | None = None
    ) -> None:
        """`shares_values`: write values that never change by reference too, so that a prompt is not written twice.
        `contents`: id of an object → what it contained at the moment that is written (`wire/captured_state.py`)."""
        super().__init__(masking)
        self._contents = contents
        self._shares_values = shares_values
        self._numbers: dict[int, int] = {}
        self._queue: deque[tuple[object, object]] = deque()
        self._constants = _constants(len(sys.modules))
        self._kept: list[object] = []
        """Everything that was numbered: an id names an object only while it lives."""

    def encode(self, root: object, mark: object = None) -> bytes:
        return self._encoded(self._value(root, mark))

    def encode_each(self, values: Sequence[object], marks: Sequence[object]) -> bytes:
        padded = zip_longest(values, marks)
        return self._encoded([Kind.TUPLE, *[self._value(value, mark) for value, mark in padded]])

    def _encoded(self, top: object) -> bytes:
        while self._queue:
            value, its_mark = self._queue.popleft()
            self._bodies.append(self._body(value, its_mark))
        return self._written(top)

    def _reference(self, value: object, mark: object) -> list[Any]:
        if not self._shares_values and _never_changes(value):
            return super()._reference(value, mark)
        number = self._numbers.get(id(value))
        if number is None:
            constant = self._constants.get(id(value))
            if constant is not None:
                return [Kind.CONSTANT, *constant]
            number = self._numbers[id(value)] = len(self._numbers)
            self._kept.append(value)
            self._queue.append((value, mark))
        return [Kind.REFERENCE, number]

    def _contents_of(self, value: Any) -> Any:
        if self._contents is None:
            return value
        found = self._contents.get(id(value), value)
        if found is value and not isinstance(value, np.ndarray | msgspec.Struct):  # what never changes is not captured
            raise CannotSnapshot(f"a {type(value).__qualname__} was not captured")
        return found

    def _is_writeable(self, value: npt.NDArray[Any]) -> bool:
        return bool(value.flags.writeable)


def _never_changes(value: object) -> bool:
    if isinstance(value, np.ndarray):
        return not value.flags.writeable
    return isinstance(value, msgspec.Struct) and value.__struct_config__.frozen


class _Absent(enum.Enum):
    ABSENT = 0


_ABSENT = _Absent.ABSENT


def _fit(items: Sequence[Any], kinds: set[type]) -> bool:
    """Whether all integers have at most 64 bits."""
    if int not in kinds:
        return True
    numbers = items if kinds == {int} else [item for item in items if type(item) is int]
    return min(numbers) >= _INT64_MIN and max(numbers) < _INT64_END


def _in_order(values: Iterable[Any]) -> list[Any]:
    """The order of a set is not part of its value."""
    return sorted(values, key=msgspec.msgpack.encode)


@functools.lru_cache(maxsize=1)
def _constants(_modules: int) -> dict[int, tuple[str, str]]:
    """Id → module and name of each constant that is an object; `_modules`: how many modules are loaded."""
    ours = [(name, vars(module)) for name, module in list(sys.modules.items()) if name.startswith(MODULES)]
    return {
        id(value): (module, name)
        for module, names in sorted(ours, key=lambda pair: pair[0])
        for name, value in names.items()
        if name.isupper() and type(value) not in SCALARS and not isinstance(value, tuple | frozenset | type)
    }


def _checked_module(module: str) -> str:
    if not module.startswith(MODULES):
        raise CannotSnapshot(f"what {module} defines cannot be in a snapshot")
    return module


def fields_of(value: Any) -> tuple[tuple[str, ...], Sequence[Any]]:
    """Names and values of the fields of an object or a Struct."""
    kind: Any = type(value)
    if chooses_fields(kind):
        fields = value.snapshot_fields()
        return tuple(fields), [*fields.values()]
    names = slots_of(kind)
    items = _slot_items(value, names)
    own = getattr(value, "__dict__", None)
    return (names, items) if own is None else ((*names, *own), [*items, *own.values()])


def _slot_items(value: object, names: tuple[str, ...]) -> Sequence[Any]:
    """The values of these attributes. All at once where all are set: this takes much of the time of a snapshot."""
    if len(names) > 1:
        try:
            found: tuple[Any, ...] = _getter(names)(value)
        except AttributeError:
            pass
        else:
            return found
    return [getattr(value, name, _ABSENT) for name in names]


@functools.cache
def _getter(names: tuple[str, ...]) -> Callable[[object], Any]:
    return operator.attrgetter(*names)


@functools.cache
def chooses_fields(kind: Any) -> bool:
    return issubclass(kind, HasSnapshotFields)


@functools.cache
def slots_of(kind: Any) -> tuple[str, ...]:
    if issubclass(kind, msgspec.Struct):
        return tuple(kind.__struct_fields__)
    named: list[str] = []
    for owner in reversed(kind.__mro__):
        own = owner.__dict__.get("__slots__", ())
        named += [own] if isinstance(own, str) else own
    return tuple(name for name in named if name not in ("__dict__", "__weakref__"))


# ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


class GraphDecoder:
    """Makes all objects first, then fills them, so that they can refer to each other in circles."""

    def __init__(self, data: bytes, hashes: ContentHashes | None) -> None:
        try:
            version, classes, self._top, self._bodies = msgspec.msgpack.decode(data)
            if version != FORMAT:
                raise BadSnapshot(f"the snapshot has format {version!r}, and this version reads format {FORMAT}")
            listed = msgspec.convert(classes, list[tuple[str, str, tuple[str, ...]]])
            self._bodies = msgspec.convert(self._bodies, list[list[Any]])
        except (msgspec.DecodeError, ValueError, TypeError, RecursionError) as error:
            raise BadSnapshot(f"this is no snapshot: {error}") from None
        self._classes = [(_named(module, name), names) for module, name, names in listed]
        self._hashes = hashes
        self._made: list[Any] = [_ABSENT] * len(self._bodies)
        self._depth = 0

    def root(self) -> Any:
        try:
            for number in range(len(self._bodies)):
                self._shell(number)
            filled = [*zip(self._bodies, self._made, strict=True)]
            for body, made in filled:  # before containers, which hash their members
                if body[0] == Kind.OBJECT:
                    self._fill(body, made)
            for body, made in filled:
                if body[0] != Kind.OBJECT:
                    self._fill(body, made)
            return self._value(self._top)
        except (TypeError, ValueError, LookupError, AttributeError, OverflowError, RecursionError) as error:
            raise BadSnapshot(f"the snapshot is damaged: {type(error).__name__}: {error}") from None

    def _shell(self, number: int) -> Any:
        made = self._made[number]
        if made is _ABSENT:
            made = self._made[number] = self._empty(self._bodies[number])
        return made

    def _value(self, value: Any) -> Any:
        if type(value) is not list:
            return value
        kind, *rest = value
        return self._READERS[kind](self, rest)

    def _tuple(self, rest: list[Any]) -> Any:
        return tuple(map(self._value, rest))

    def _named_tuple(self, rest: list[Any]) -> Any:
        kind, _ = self._classes[rest[0]]
        if not issubclass(kind, tuple):
            raise BadSnapshot(f"{kind.__qualname__} is no tuple")
        return tuple.__new__(kind, map(self._value, rest[1:]))

    def _enum(self, rest: list[Any]) -> Any:
        kind, name = self._classes[rest[0]][0], rest[1]
        if not issubclass(kind, enum.Enum):
            raise BadSnapshot(f"{kind.__qualname__} is no enum")
        return kind[name]

    def _big_int(self, rest: list[Any]) -> int:
        if len(rest[0]) > BIG_INT_BYTES_MAX:
            raise BadSnapshot(f"an integer of {len(rest[0])} bytes")
        return int.from_bytes(rest[0], "little", signed=True)

    def _method(self, rest: list[Any]) -> Any:
        owner, name = self._value(rest[0]), rest[1]
        built_in = isinstance(owner, dict | list) and name in _VIEWS
        if not built_in and not isinstance(getattr(type(owner), name, None), FunctionType):
            raise BadSnapshot(f"{type(owner).__qualname__} has no method {name!r}")
        return getattr(owner, name)

    def _read_hashes(self, _: list[Any]) -> ContentHashes:
        if self._hashes is None:
            raise BadSnapshot("a value refers to hashes")
        return self._hashes

    def _function(self, rest: list[Any]) -> Any:
        found = _named(rest[0], rest[1])
        if not isinstance(found, FunctionType):
            raise BadSnapshot(f"{rest[1]!r} is no function of {rest[0]}")
        return found

    def _inline(self, rest: list[Any]) -> Any:
        self._depth += 1
        if self._depth > DEPTH_MAX:
            raise BadSnapshot(f"values are nested deeper than {DEPTH_MAX}")
        made = self._empty(rest[0])
        self._fill(rest[0], made)
        self._depth -= 1
        return made

    _READERS: Mapping[int, Callable[[GraphDecoder, list[Any]], Any]] = {
        Kind.REFERENCE: lambda self, rest: self._shell(rest[0]),
        Kind.TUPLE: _tuple,
        Kind.NAMED_TUPLE: _named_tuple,
        Kind.ENUM: _enum,
        Kind.BIG_INT: _big_int,
        Kind.NUMPY_SCALAR: lambda _, rest: np.frombuffer(rest[1], dtype=_dtype(rest[0]))[0],
        Kind.HASHES: _read_hashes,
        Kind.METHOD: _method,
        Kind.FUNCTION: _function,
        Kind.CLASS: lambda self, rest: self._classes[rest[0]][0],
        Kind.BODY: _inline,
        Kind.CONSTANT: lambda _, rest: _constant(rest[0], rest[1]),
        Kind.FROZEN_SET: lambda self, rest: frozenset(map(self._value, rest)),
    }

    # ── bodies ───────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _empty(self, body: list[Any]) -> Any:
        """The object of a body without its contents; what cannot be filled later, with them."""
        match body[0]:
            case Kind.LIST | Kind.PLAIN_LIST | Kind.TUPLE_LIST:
                return []
            case Kind.DICT | Kind.PLAIN_DICT:
                return DICTS[body[1]]() if type(body[1]) is int else defaultdict(self._factory(body[1]))
            case Kind.SET:
                return set()
            case Kind.DEQUE:
                return deque(maxlen=body[1])
            case Kind.ARRAY:
                return _array_of(*body[1:])
            case Kind.BYTE_ARRAY:
                return _byte_array(body[1])
            case Kind.STRUCT:
                return self._struct(body)
            case Kind.OBJECT:
                kind, _ = self._classes[body[1]]
                if not isinstance(kind, type) or issubclass(kind, type | BaseException):
                    raise BadSnapshot(f"{kind!r} is no class of an object")
                return object.__new__(kind)
            case _:
                raise BadSnapshot(f"an object of the kind {body[0]!r}")

    def _factory(self, value: Any) -> Any:
        factory = self._value(value)
        if factory is not None and not isinstance(factory, type):
            raise BadSnapshot("a dictionary whose defaults are made by no class")
        return factory

    def _struct(self, body: list[Any]) -> Any:
        kind, names = self._classes[body[1]]
        if not (isinstance(kind, type) and issubclass(kind, msgspec.Struct)):
            raise BadSnapshot(f"{kind!r} is no Struct")
        return kind(**dict(zip(names, map(self._value, body[2:]), strict=True)))

    def _fill(self, body: list[Any], made: Any) -> None:
        match body[0]:
            case Kind.LIST:
                made += map(self._value, body[1:])
            case Kind.PLAIN_LIST:
                made += body[1]
            case Kind.TUPLE_LIST:
                made += map(tuple, body[1])
            case Kind.DICT:
                items = list(map(self._value, body[2:]))
                _put(made, items[::2], items[1::2])
            case Kind.PLAIN_DICT:
                _put(made, body[2], body[3])
            case Kind.SET:
                made |= set(map(self._value, body[1:]))
            case Kind.DEQUE:
                made.extend(map(self._value, body[2:]))
            case Kind.OBJECT:
                self._fill_object(body, made)

    def _fill_object(self, body: list[Any], made: Any) -> None:
        names = self._classes[body[1]][1]
        fields = {n: self._value(v) for n, v in zip(names, body[2:], strict=True) if v != [Kind.ABSENT]}
        kind: Any = type(made)
        if chooses_fields(kind):
            made.restore_fields(fields)
            return
        for name, value in fields.items():
            object.__setattr__(made, name, value)


def _put(made: dict[Any, Any], keys: Sequence[Any], values: Sequence[Any]) -> None:
    for key, value in zip(keys, values, strict=True):
        made[key] = value  # noqa: PERF403  of a Counter, update would add


def _byte_array(data: Any) -> bytearray:
    if type(data) is not bytes:  # of a number, Python would make as many bytes
        raise BadSnapshot(f"a {type(data).__name__} in place of bytes")
    return bytearray(data)


def _array_of(dtype: str, shape: list[int], data: bytes, writeable: bool) -> npt.NDArray[Any]:
    array = np.frombuffer(data, dtype=_dtype(dtype)).reshape(shape).copy()
    array.setflags(write=writeable)
    return array


def _dtype(name: str) -> np.dtype[Any]:
    if not _DTYPE.fullmatch(name):  # numpy would parse a small language here
        raise BadSnapshot(f"an array of {name[:40]!r}")
    return np.dtype(name)


def _constant(module: str, name: str) -> Any:
    if not name.isupper():
        raise BadSnapshot(f"{name} is no constant")
    return _looked_up(module, name)


def _named(module: str, name: str) -> Any:
    """A class or function of one of our modules, by name."""
    found = _looked_up(module, name)
    if not isinstance(found, type | FunctionType) or found.__module__ != module:
        raise BadSnapshot(f"{module} does not define {name}")
    return found


def _looked_up(module: str, name: str) -> Any:
    if not module.startswith(MODULES) or not all(part.isidentifier() for part in (*module.split("."), *name.split("."))):
        raise BadSnapshot(f"{module}.{name} may not be in a snapshot")
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = vars(found)[part]
    except (ImportError, LookupError, TypeError):
        raise BadSnapshot(f"this version of Baton has no {module}.{name}") from None
    return found
