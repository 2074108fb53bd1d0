"""A store on a disk that is really full: `python -m tests.kv.full_disk DIR`, where DIR is a disk of about one megabyte."""

from __future__ import annotations

import random
import sys

from baton.kv.store import open_store
from tests.support.stores import sample


def main() -> None:
    draw = random.Random(1)
    store = open_store(f"file:{sys.argv[1]}")
    made = [sample(draw, 50_000) for _ in range(40)]
    stored = store.put([each.name for each in made], [memoryview(each.data) for each in made])
    assert 5 < sum(stored) < 40
    again = open_store(f"file:{sys.argv[1]}")
    into = memoryview(bytearray(60_000))
    for each, there in zip(made, stored, strict=True):
        (count,) = again.get([each.name], [into])
        assert (into[: max(0, count)] == each.data) is there
    again.drop([each.name for each in made])
    assert again.put([made[-1].name], [memoryview(made[-1].data)]) == [True]
    print("full, read, freed, written")


if __name__ == "__main__":
    main()
