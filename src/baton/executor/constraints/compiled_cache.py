"""The backends of an executor and a bounded cache of what they have compiled. Safe to use from several threads."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from threading import Lock

from baton.core.engine.request import Constraint, Tokens
from baton.executor.constraints.contract import CompiledConstraint, ConstraintBackend, ConstraintError, Matcher

COMPILED_MAX = 512
"""Compiled constraints that are kept, the latest used ones: more than a front end remembers of one tenant."""
SOURCE_CHARS_MAX = 16 << 20
"""Characters of the sources of all that are kept; memory follows these."""


class CompiledConstraints:
    def __init__(self, backends: Sequence[ConstraintBackend] = (), compiled_max: int = COMPILED_MAX) -> None:
        self._backends = {backend.name: backend for backend in backends}
        self._compiled_max = compiled_max
        self._compiled: OrderedDict[tuple[str, str], CompiledConstraint] = OrderedDict()
        self._chars = 0
        self._lock = Lock()
        """Protects `_compiled` and `_chars`."""

    @property
    def versions(self) -> tuple[tuple[str, str], ...]:
        """Name and version of each backend, as `WorkerConfig.constraint_backends` has them."""
        return tuple((backend.name, backend.version) for backend in self._backends.values())

    def has(self, constraint: Constraint) -> bool:
        """Whether it is compiled, or there is no backend that could."""
        with self._lock:
            key = constraint.backend, constraint.source
            if key in self._compiled:
                self._compiled.move_to_end(key)
                return True
            return constraint.backend not in self._backends

    def matcher(self, constraint: Constraint, outputs: Tokens) -> Matcher:
        """A matcher that has consumed these outputs. Raises ConstraintError."""
        matcher = self.compile(constraint).matcher()
        for nth, token in enumerate(outputs.tolist()):
            if not matcher.consume(token):
                raise ConstraintError(f"output {nth} of {len(outputs)} is not one that the constraint allows")
        return matcher

    def compile(self, constraint: Constraint) -> CompiledConstraint:
        """From the cache, or compiled here and now. Raises ConstraintError."""
        key = name, source = constraint.backend, constraint.source
        with self._lock:
            found = self._compiled.get(key)
            if found is not None:
                self._compiled.move_to_end(key)
                return found
        if name not in self._backends:
            raise ConstraintError(f"there is no backend {name!r} here")
        made = self._backends[name].compile(source)  # outside of the lock: it may take a second
        with self._lock:
            self._keep(key, made)
        return made

    def _keep(self, key: tuple[str, str], made: CompiledConstraint) -> None:
        if key not in self._compiled:
            self._chars += len(key[1])
        self._compiled[key] = made
        while len(self._compiled) > self._compiled_max or (self._chars > SOURCE_CHARS_MAX and len(self._compiled) > 1):
            (_, source), _ = self._compiled.popitem(last=False)
            self._chars -= len(source)


class DeferredBackend:
    """A backend that is made when its first constraint is compiled, because making it takes time."""

    def __init__(self, name: str, version: str, make: Callable[[], ConstraintBackend]) -> None:
        self.name = name
        self.version = version
        self._make = make
        self._made: ConstraintBackend | None = None
        self._lock = Lock()

    def compile(self, source: str) -> CompiledConstraint:
        with self._lock:
            if self._made is None:
                self._made = self._make()
        return self._made.compile(source)


MakeBackends = Callable[[int], Sequence[ConstraintBackend]]
"""Makes backends for a vocabulary of that size."""


def no_backends(vocabulary: int) -> Sequence[ConstraintBackend]:
    del vocabulary
    return ()


NO_CONSTRAINTS = CompiledConstraints()
"""Of an executor without backends: its constrained requests fail."""
