"""Doing a fault to an instance: signals to its processes, a cut through its connection.

Only ever touches a process whose command line says that it is the instance meant: numbers of processes are used again.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
from pathlib import Path

from baton.bench.chaos_faults import FaultKind, SeenInstance

_PIDFD_GETFD = 438
"""The number of the system call; the C library may not know it by name."""


class NoSuchVictim(Exception):
    """The process has ended meanwhile."""


def is_instance(pid: int, name: str) -> bool:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return b"serve" in words and name.encode() in words


def hurt(kind: FaultKind, victim: SeenInstance) -> None:
    """Raises NoSuchVictim where it is too late."""
    if not is_instance(victim.pid, victim.name):
        raise NoSuchVictim(victim.name)
    try:
        match kind:
            case FaultKind.KILL:
                os.kill(victim.pid, signal.SIGKILL)
            case FaultKind.KILL_ENGINE:
                os.kill(engine_of(victim.pid), signal.SIGKILL)
            case FaultKind.STOP:
                for pid in (engine_of(victim.pid), victim.pid):
                    os.kill(pid, signal.SIGSTOP)
            case FaultKind.STOP_ENGINE:
                os.kill(engine_of(victim.pid), signal.SIGSTOP)
            case FaultKind.RESTART:
                os.kill(victim.pid, signal.SIGTERM)
            case FaultKind.CUT:
                cut(victim.pid, _router_port(victim.pid))
            case FaultKind.DRAIN:
                raise ValueError("draining is asked of the router")
    except (ProcessLookupError, FileNotFoundError):
        raise NoSuchVictim(victim.name) from None


def wake(victim: SeenInstance) -> None:
    """Both of its processes, whichever was stopped; nothing where it is gone."""
    if is_instance(victim.pid, victim.name):
        for pid in (victim.pid, *engines_of(victim.pid)):
            os.kill(pid, signal.SIGCONT)


def engines_of(pid: int) -> list[int]:
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return [int(child) for child in children if b"baton.node.engine" in Path(f"/proc/{child}/cmdline").read_bytes()]
    except OSError:
        return []


def engine_of(pid: int) -> int:
    engines = engines_of(pid)
    if not engines:
        raise ProcessLookupError(pid)
    return engines[0]


def _router_port(pid: int) -> int:
    words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    return int(words[words.index(b"--router") + 1].rpartition(b":")[2])


def cut(pid: int, port: int) -> None:
    """Shut down the connection of a process to a port, from outside: both ends see it end."""
    wanted = {f"socket:[{inode}]" for inode in _inodes(pid, port)}
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        if os.readlink(entry) in wanted:
            with socket.socket(fileno=_borrow(pid, int(entry.name))) as connection:
                connection.shutdown(socket.SHUT_RDWR)
            return
    raise ProcessLookupError(pid)


def can_cut() -> bool:
    """Whether this system lets us borrow a child's socket."""
    try:
        os.close(_borrow(os.getpid(), 0))
    except OSError:
        return False
    return True


def _inodes(pid: int, port: int) -> list[str]:
    """Of the connections to that port, as the process's network sees them."""
    rows = [line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
    return [row[9] for row in rows if int(row[2].rpartition(":")[2], 16) == port]


def _borrow(pid: int, descriptor: int) -> int:
    """A descriptor of ours for what another process has open."""
    process = os.pidfd_open(pid)
    try:
        borrowed = ctypes.CDLL(None, use_errno=True).syscall(_PIDFD_GETFD, process, descriptor, 0)
    finally:
        os.close(process)
    if borrowed < 0:
        raise OSError(ctypes.get_errno(), f"cannot borrow descriptor {descriptor} of process {pid}")
    return int(borrowed)
