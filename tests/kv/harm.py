"""Damage to the files of a store, at random, many times over: what is damaged must never be taken for good.

    python -m tests.kv.harm --count 100000 [--seed N]

Each injection takes a sound store and flips, cuts, lengthens, overwrites, swaps, copies or removes one of its files, or puts
in its place what is no file. Then everything that it may have touched is fetched and opened. It must be refused, or be
exactly the block that was stored; what is refused is dropped and stored again, as a server would.
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from baton.kv.file_store import FileStore
from baton.kv.store import MISSING, OVERSIZED
from baton.wire.envelope import HEADER_BYTES, EnvelopeFlaw, unseal
from tests.support.stores import LAYOUT, OTHER_LAYOUT, Sample, sample

OBJECTS = 24
SIZE_MAX = 3000
ODD_CHANGES = (-HEADER_BYTES, -1, 1, 7, 8, 64, 4096)

Harm = Callable[[Path, Path, random.Random], None]


def _flip(path: Path, _other: Path, draw: random.Random) -> None:
    data = bytearray(path.read_bytes())
    for _ in range(draw.choice((1, 1, 1, 2, 9))):
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    path.write_bytes(data)


def _flip_in_header(path: Path, _other: Path, draw: random.Random) -> None:
    data = bytearray(path.read_bytes())
    data[draw.randrange(HEADER_BYTES)] ^= 1 << draw.randrange(8)
    path.write_bytes(data)


def _truncate(path: Path, _other: Path, draw: random.Random) -> None:
    os.truncate(path, draw.choice((0, 1, HEADER_BYTES, draw.randrange(path.stat().st_size))))


def _hole(path: Path, _other: Path, draw: random.Random) -> None:
    """As a power cut leaves it: the right size, and zeros from some page on."""
    size = path.stat().st_size
    os.truncate(path, draw.randrange(size))
    os.truncate(path, size)


def _append(path: Path, _other: Path, draw: random.Random) -> None:
    with path.open("ab") as file:
        file.write(draw.choice((bytes(draw.randint(1, 9)), draw.randbytes(draw.randint(1, 5000)))))


def _remove_bytes(path: Path, _other: Path, draw: random.Random) -> None:
    data = bytearray(path.read_bytes())
    begin = draw.randrange(len(data))
    del data[begin : begin + draw.randint(1, 100)]
    path.write_bytes(data)


def _insert_bytes(path: Path, _other: Path, draw: random.Random) -> None:
    data = bytearray(path.read_bytes())
    at = draw.randrange(len(data) + 1)
    data[at:at] = draw.randbytes(draw.randint(1, 100))
    path.write_bytes(data)


def _overwrite(path: Path, _other: Path, draw: random.Random) -> None:
    data = bytearray(path.read_bytes())
    begin = draw.randrange(len(data))
    end = min(len(data), begin + draw.randint(1, 512))
    data[begin:end] = draw.choice((bytes(end - begin), b"\xff" * (end - begin), draw.randbytes(end - begin)))
    path.write_bytes(data)


def _swap_bytes(path: Path, _other: Path, draw: random.Random) -> None:
    """Two runs of one file change places: whatever adds bytes up would not see it."""
    data = bytearray(path.read_bytes())
    width = draw.randint(1, max(1, len(data) // 4))
    first = draw.randrange(len(data) - 2 * width + 1)
    second = draw.randrange(first + width, len(data) - width + 1)
    data[first : first + width], data[second : second + width] = data[second : second + width], data[first : first + width]
    path.write_bytes(data)


def _swap_files(path: Path, other: Path, _draw: random.Random) -> None:
    aside = path.with_name("aside")
    path.rename(aside)
    other.rename(path)
    aside.rename(other)


def _copy_over(path: Path, other: Path, _draw: random.Random) -> None:
    path.write_bytes(other.read_bytes())


def _splice(path: Path, other: Path, draw: random.Random) -> None:
    """The head of one, the tail of another; its own header and a stranger's payload among them."""
    ours, theirs = path.read_bytes(), other.read_bytes()
    at = draw.choice((HEADER_BYTES, 48, draw.randrange(len(ours))))
    path.write_bytes(ours[:at] + theirs[at:])


def _same_key_of_another_model(path: Path, _other: Path, draw: random.Random) -> None:
    key = bytes.fromhex(path.name)
    path.write_bytes(sample(draw, path.stat().st_size - HEADER_BYTES, layout=OTHER_LAYOUT, key=key).data)


def _remove(path: Path, _other: Path, _draw: random.Random) -> None:
    path.unlink()


def _link_elsewhere(path: Path, other: Path, draw: random.Random) -> None:
    path.unlink()
    path.symlink_to(draw.choice((other, path, Path("/dev/zero"))))


def _pipe(path: Path, _other: Path, _draw: random.Random) -> None:
    path.unlink()
    os.mkfifo(path)


def _random_file(path: Path, _other: Path, draw: random.Random) -> None:
    path.write_bytes(draw.randbytes(draw.randrange(2 * SIZE_MAX)))


def _odd_length(path: Path, _other: Path, draw: random.Random) -> None:
    os.truncate(path, max(0, path.stat().st_size + draw.choice(ODD_CHANGES)))


HARMS: dict[str, Harm] = {
    harm.__name__.strip("_"): harm
    for harm in (
        _flip, _flip_in_header, _truncate, _hole, _append, _remove_bytes, _insert_bytes, _overwrite, _swap_bytes,
        _swap_files, _copy_over, _splice, _same_key_of_another_model, _remove, _link_elsewhere, _pipe,
        _random_file, _odd_length,
    )
}  # fmt: skip


class ServedBad(AssertionError):
    """The one thing that must never happen."""


class Harmed:
    """A store under damage, and what became of it."""

    def __init__(self, folder: Path, seed: int) -> None:
        self._draw = random.Random(seed)
        self._store = FileStore(str(folder), 5.0, None)
        self._folder = folder
        self._samples = [sample(self._draw, self._draw.randint(1, SIZE_MAX)) for _ in range(OBJECTS)]
        self._into = memoryview(bytearray(HEADER_BYTES + SIZE_MAX))
        self.outcomes: Counter[str] = Counter()
        self.harms: Counter[str] = Counter()
        self._repair(self._samples)

    def inject(self) -> None:
        victim, other = self._draw.sample(self._samples, 2)
        name = self._draw.choice(list(HARMS))
        HARMS[name](self._path(victim), self._path(other), self._draw)
        self.harms[name] += 1
        touched = [each for each in (victim, other) if not self._is_served(each, name)]
        self._repair(touched)

    def _is_served(self, wanted: Sample, harm: str) -> bool:
        (count,) = self._store.get([wanted.name], [self._into])
        if count in (MISSING, OVERSIZED):
            self.outcomes["missing" if count == MISSING else "oversized"] += 1
            return False
        found = unseal(wanted.key, LAYOUT, self._into[:count])
        if isinstance(found, EnvelopeFlaw):
            self.outcomes[str(found)] += 1
            return False
        if found != wanted.payload:
            raise ServedBad(f"{harm} of {wanted.name} was opened as good")
        self.outcomes["sound"] += 1
        return True

    def _repair(self, bad: list[Sample]) -> None:
        names = [each.name for each in bad]
        self._store.drop(names)
        if self._store.put(names, [memoryview(each.data) for each in bad]) != [True] * len(bad):
            raise ServedBad("what was dropped could not be stored again")

    def _path(self, each: Sample) -> Path:
        layout, key = each.name.split("/")
        return self._folder / layout / key[:2] / key


def harmed(folder: Path, count: int, seed: int) -> Harmed:
    made = Harmed(folder, seed)
    for _ in range(count):
        made.inject()
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description="Damage stored files at random; fail if any is taken for good.")
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        made = harmed(Path(folder), options.count, options.seed)
    print(f"{options.count:,} injections, none taken for good")
    for title, counts in (("harm", made.harms), ("what was fetched", made.outcomes)):
        print(f"{title}: " + ", ".join(f"{name} {times:,}" for name, times in sorted(counts.items())))


if __name__ == "__main__":
    main()
