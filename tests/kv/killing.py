"""Writers of a file store that are killed with SIGKILL, and what is demanded of the store afterwards.

    python -m tests.kv.killing points DIR        at every call to the system that writing and making room consist of
    python -m tests.kv.killing moments DIR N     at N random moments
    python -m tests.kv.killing crowd DIR N       several writers at once, N times; at the end all of them are killed

A process of its own, since it forks: a test runner has threads.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from baton.kv.file_store import FileStore
from baton.kv.store import MISSING, Store, open_store
from baton.wire.envelope import OpenedEnvelope, object_name, open_any
from tests.support.stores import sample

SIZE = 3000
LIMIT_BYTES = 10 * (SIZE + 64)
CALLS = ("open", "write", "pwrite", "ftruncate", "utime", "rename", "unlink", "close", "mkdir", "pread", "scandir")


def demand_sound(folder: Path, store: Store) -> None:
    """Whatever is visible is whole and under its own name, the limit holds, and the next one can go on at once."""
    total = 0
    for name, size in store.names():
        data = (folder / name[:16] / name[17:19] / name[17:]).read_bytes()
        opened = open_any(memoryview(data))
        assert isinstance(opened, OpenedEnvelope), f"{name}: {opened}"
        assert object_name(opened.layout, opened.key) == name
        assert len(data) == size
        total += size
    assert total <= LIMIT_BYTES, f"{total} bytes are over the limit"


def demand_tidy(folder: Path, made: random.Random) -> None:
    """After the next start nothing is left over, and it serves."""
    store = open_store(f"file:{folder}", timeout_s=30, limit_bytes=LIMIT_BYTES)
    assert list((folder / ".writing").iterdir()) == []
    each = sample(made, SIZE)
    assert store.put([each.name], [memoryview(each.data)]) == [True]
    demand_sound(folder, store)


# ── at every point ───────────────────────────────────────────────────────────────────────────────────────────────────────


class Fuse:
    """Kills this process at the n-th of the calls that pass through it; a write that it hits is half done."""

    def __init__(self, n: int) -> None:
        self._left = n

    def install(self) -> None:
        for name in CALLS:
            setattr(os, name, self._around(getattr(os, name), self._half if name == "write" else None))
        fcntl.flock = self._around(fcntl.flock)

    def _around(self, call: Callable[..., Any], half: Callable[..., Any] | None = None) -> Callable[..., Any]:
        def fused(*arguments: Any, **options: Any) -> Any:
            self._burn()
            if half is not None:
                half(call, *arguments)
            return call(*arguments, **options)

        return fused

    def _half(self, write: Callable[[int, memoryview], int], fd: int, data: memoryview) -> None:
        if self._left == 0:
            write(fd, data[: len(data) // 2])
        self._burn()

    def _burn(self) -> None:
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        self._left -= 1


def die_at(folder: Path, point: int) -> bool:
    """One writer, which fills the store beyond its limit; False when it was done before it came to that point."""
    child = os.fork()
    if not child:
        with _leaving():
            store = FileStore(str(folder), 30, LIMIT_BYTES)
            made = [sample(random.Random(point * 100 + at), SIZE) for at in range(2)]
            Fuse(point).install()
            store.put([each.name for each in made], [memoryview(each.data) for each in made])
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, status
    return os.WIFSIGNALED(status)


def at_every_point(folder: Path) -> int:
    draw = random.Random(1)
    visitor = open_store(f"file:{folder}", timeout_s=30, limit_bytes=LIMIT_BYTES)
    point = 0
    while True:
        killed = die_at(folder, point)
        demand_sound(folder, visitor)
        if point % 3 == 0 or not killed:
            demand_tidy(folder, draw)
        if not killed:
            return point
        point += 1


# ── at any moment ────────────────────────────────────────────────────────────────────────────────────────────────────────


def writer(folder: Path, seed: int) -> int:
    """Writes, reads, drops and clears for ever."""
    child = os.fork()
    if not child:
        with _leaving():
            draw = random.Random(seed)
            store = open_store(f"file:{folder}", timeout_s=30, limit_bytes=LIMIT_BYTES)
            for _ in itertools.count():
                _use(store, draw)
    return child


def _use(store: Store, draw: random.Random) -> None:
    made = [sample(draw, draw.randint(1, SIZE)) for _ in range(3)]
    names = [each.name for each in made]
    store.put(names, [memoryview(each.data) for each in made])
    into = [memoryview(bytearray(SIZE + 64)) for _ in made]
    for each, buffer, count in zip(made, into, store.get(names, into), strict=True):
        assert count == MISSING or buffer[:count] == each.data
    if draw.random() < 0.1:
        store.drop(names[:1])
    if draw.random() < 0.02:
        store.clear()


def kill(child: int) -> None:
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), f"a writer ended by itself: {status}"


def at_random_moments(folder: Path, times: int) -> int:
    draw = random.Random(2)
    visitor = open_store(f"file:{folder}", timeout_s=30, limit_bytes=LIMIT_BYTES)
    for at in range(times):
        child = writer(folder, at)
        time.sleep(draw.random() * 0.02)
        kill(child)
        demand_sound(folder, visitor)
    demand_tidy(folder, draw)
    return times


def crowded(folder: Path, times: int) -> int:
    draw = random.Random(3)
    for at in range(times):
        children = [writer(folder, 10 * at + each) for each in range(4)]
        time.sleep(0.02 + draw.random() * 0.1)
        for child in children:
            kill(child)
        demand_tidy(folder, draw)
    return times


@contextlib.contextmanager
def _leaving() -> Iterator[None]:
    """A forked child must not come back as a second parent."""
    try:
        yield
    except BaseException as error:
        sys.stderr.write(f"a writer failed: {error!r}\n")
        os._exit(1)
        raise
    os._exit(0)


def main() -> None:
    what, folder, times = sys.argv[1], Path(sys.argv[2]), int((*sys.argv, "0")[3])
    match what:
        case "points":
            print(at_every_point(folder))
        case "moments":
            print(at_random_moments(folder, times))
        case _:
            print(crowded(folder, times))


if __name__ == "__main__":
    main()
