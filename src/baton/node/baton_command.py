"""The command line of a `baton` subcommand that is started as a process of its own."""

from __future__ import annotations

from baton.executor.python_command import python_command


def baton_command(*arguments: str) -> tuple[str, ...]:
    """The same version under the same interpreter, whatever `baton` on the PATH is."""
    return tuple(python_command("baton", *arguments))
