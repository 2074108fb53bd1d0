"""Injects a fault into an instance: signals to its processes, or a shutdown of its connection.

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
"""System call number; the C library may lack a wrapper."""


class NoSuchVictim(Exception):
    """The process has already ended."""


def is_instance(pid: int, name: str) -> bool:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return b"serve" in words and name.encode() in words


def inject(kind: FaultKind, victim: SeenInstance) -> None:
    """Inject the fault. Raises NoSuchVictim when the process has ended."""
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
            case FaultKind.STOP_ENGINE | FaultKind.HANG_ENGINE:
                os.kill(engine_of(victim.pid), signal.SIGSTOP)
            case FaultKind.RESTART:
                os.kill(victim.pid, signal.SIGTERM)
            case FaultKind.CUT:
                cut(victim.pid, _router_port(victim.pid))
            case FaultKind.DRAIN:
                raise ValueError("draining is asked of the router")
    except (ProcessLookupError, FileNotFoundError):
        raise NoSuchVictim(victim.name) from None


def resume(victim: SeenInstance) -> None:
    """Resume both processes of an instance; no-op when they have ended."""
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
    """Shut down the connection of another process to a port; both ends see it close."""
    wanted = {f"socket:[{inode}]" for inode in _inodes(pid, port)}
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        if os.readlink(entry) in wanted:
            with socket.socket(fileno=_borrow(pid, int(entry.name))) as connection:
                connection.shutdown(socket.SHUT_RDWR)
            return
    raise ProcessLookupError(pid)


def can_cut() -> bool:
    """Whether this system allows duplicating a child's socket."""
    try:
        os.close(_borrow(os.getpid(), 0))
    except OSError:
        return False
    return True


def _inodes(pid: int, port: int) -> list[str]:
    """Inodes of the connections to that port in the process's network namespace."""
    rows = [line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
    return [row[9] for row in rows if int(row[2].rpartition(":")[2], 16) == port]


def _borrow(pid: int, descriptor: int) -> int:
    """Duplicate a file descriptor of another process."""
    process = os.pidfd_open(pid)
    try:
        borrowed = ctypes.CDLL(None, use_errno=True).syscall(_PIDFD_GETFD, process, descriptor, 0)
    finally:
        os.close(process)
    if borrowed < 0:
        raise OSError(ctypes.get_errno(), f"cannot borrow descriptor {descriptor} of process {pid}")
    return int(borrowed)
