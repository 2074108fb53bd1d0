"""Replaces functions of `baton.core`, `baton.wire` and the scripted executor for the time of one test, found by name.

A name is the function's own, and as many words of its path in front of it as make it unique: `_preempt`, `engine._end`
(a package), `RequestTable.adopt` (a class). A function that moves is found where it went; a name that fits none or several
definitions, raises `LookupError` with the name of the planted bug.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

PACKAGES = ("baton.core", "baton.wire")
MODULES = ("baton.executor.scripted",)
"""Besides the packages: what stands for a model in the simulator."""


class Definition(NamedTuple):
    """Where an attribute is written down: a class, or the module of a function or class."""

    owner: type | ModuleType
    name: str

    @property
    def module(self) -> str:
        return self.owner.__name__ if isinstance(self.owner, ModuleType) else self.owner.__module__

    @property
    def words(self) -> tuple[str, ...]:
        within = () if isinstance(self.owner, ModuleType) else tuple(self.owner.__qualname__.split("."))
        return (*self.module.split("."), *within, self.name)

    @property
    def value(self) -> Any:
        return getattr(self.owner, self.name)


class Patch:
    """Replaces attributes of production code, and puts them back."""

    def __init__(self, bug: str) -> None:
        self.touched: list[str] = []
        """The modules whose code was replaced."""
        self._bug = bug
        self._before: list[tuple[type | ModuleType, str, object]] = []

    def original(self, name: str) -> Any:
        """The function or class of that name, as it is before this bug replaces it."""
        return self._find(name).value

    def set(self, name: str, value: object, *, used_by: str | None = None) -> None:
        """Replace a method in its class, a function in all modules that use it.

        With `used_by`, which names a function, `name` is a global that this function reads, and it is replaced in the module
        of that function only.
        """
        if used_by is not None:
            self._replace(self._module_that_reads(name, used_by), name, value)
            return
        owner, attribute = definition = self._find(name)
        if isinstance(owner, ModuleType):
            before = definition.value
            for module in _modules():
                if module is not owner and module.__dict__.get(attribute) is before:
                    self._before.append((module, attribute, before))
                    setattr(module, attribute, value)
        self._replace(owner, attribute, value)

    def undo(self) -> None:
        while self._before:
            owner, name, value = self._before.pop()
            setattr(owner, name, value)

    @property
    def replaced(self) -> list[tuple[type | ModuleType, str, object]]:
        """Owner, name and former value of all that is replaced now."""
        return list(self._before)

    def _replace(self, owner: type | ModuleType, name: str, value: object) -> None:
        self._before.append((owner, name, owner.__dict__[name]))
        self.touched.append(Definition(owner, name).module)
        setattr(owner, name, value)

    def _find(self, name: str) -> Definition:
        *path, attribute = name.split(".")
        found = [one for one in _definitions().get(attribute, ()) if set(path) <= set(one.words)]
        if len(found) != 1:
            where = ", ".join(".".join(one.words) for one in found) or f"nothing in {' or '.join(PACKAGES)} is called so"
            raise LookupError(f"planted bug {self._bug}: {name!r} must name one definition: {where}")
        return found[0]

    def _module_that_reads(self, name: str, function: str) -> ModuleType:
        definition = self._find(function)
        code = getattr(definition.value, "__code__", None)
        module = importlib.import_module(definition.module)
        if code is None or name not in _names(code) or name not in module.__dict__:
            raise LookupError(f"planted bug {self._bug}: {'.'.join(definition.words)} does not read a global {name!r}")
        return module


@contextmanager
def planted(bug: str, plant: Callable[[Patch], None]) -> Iterator[Patch]:
    patch = Patch(bug)
    try:
        plant(patch)
        yield patch
    finally:
        patch.undo()


@cache
def _modules() -> tuple[ModuleType, ...]:
    found = []
    for package in map(importlib.import_module, PACKAGES):
        found.append(package)
        found.extend(
            importlib.import_module(f.name) for f in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
        )
    found.extend(map(importlib.import_module, MODULES))
    return tuple(found)


@cache
def _definitions() -> dict[str, list[Definition]]:
    """By the last word; made before anything is replaced."""
    found: dict[str, list[Definition]] = {}
    for module in _modules():
        for name, value in vars(module).items():
            if getattr(value, "__module__", None) != module.__name__ or not isinstance(value, (type, FunctionType)):
                continue
            found.setdefault(name, []).append(Definition(module, name))
            for attribute, member in vars(value).items() if isinstance(value, type) else ():
                if isinstance(member, (FunctionType, property, classmethod, staticmethod)):
                    found.setdefault(attribute, []).append(Definition(value, attribute))
    return found


def _names(code: CodeType) -> set[str]:
    inner = [const for const in code.co_consts if isinstance(const, CodeType)]
    return {*code.co_names, *(name for part in inner for name in _names(part))}
