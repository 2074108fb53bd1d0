"""What every store must do, wherever it keeps its objects. A new kind joins by an entry in `tests.support.stores.SERVED`."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from baton.kv.store import MISSING, OVERSIZED, Store, open_store
from baton.wire.envelope import EnvelopeFlaw, unseal
from tests.support.stores import LAYOUT, OTHER_LAYOUT, SERVED, Arena, Sample, sample, samples, store_kinds

TIMEOUT_S = 10.0
"""Not what is tested here: a machine that is busy with other tests may be slow."""


@pytest.fixture(scope="module", params=store_kinds())
def url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder: Path = tmp_path_factory.mktemp("stores")
    with SERVED[request.param].served(folder) as address:
        yield address


@pytest.fixture
def arena() -> Arena:
    return Arena()


@pytest.fixture
def store(url: str, arena: Arena) -> Iterator[Store]:
    """An empty one."""
    opened = open_store(url, timeout_s=TIMEOUT_S)
    opened.attach(arena.whole)
    opened.clear()
    yield opened
    opened.close()


@pytest.fixture
def draw() -> random.Random:
    return random.Random(7)


def put_all(store: Store, arena: Arena, made: Sequence[Sample]) -> list[bool]:
    return store.put([each.name for each in made], [arena.of(each.data) for each in made])


def fetched(store: Store, arena: Arena, wanted: Sequence[Sample]) -> list[bytes | int]:
    """What came of each, or why nothing did."""
    into = [arena.room(len(each.data)) for each in wanted]
    counts = store.get([each.name for each in wanted], into)
    return [bytes(buffer[:count]) if count >= 0 else count for buffer, count in zip(into, counts, strict=True)]


def test_an_empty_store_has_nothing(store: Store, arena: Arena, draw: random.Random) -> None:
    made = samples(draw, 3)
    assert store.look([each.name for each in made]) == [False] * 3
    assert fetched(store, arena, made) == [MISSING] * 3
    assert list(store.names()) == []
    assert (store.stat().objects, store.stat().bytes) == (0, 0)


@pytest.mark.parametrize("size", [0, 1, 4095, 65_536, 1_000_003])
def test_what_was_put_comes_back(store: Store, arena: Arena, draw: random.Random, size: int) -> None:
    made = sample(draw, size)
    assert put_all(store, arena, [made]) == [True]
    (data,) = fetched(store, arena, [made])
    assert data == made.data
    opened = unseal(made.key, made.layout, memoryview(made.data))
    assert not isinstance(opened, EnvelopeFlaw)
    assert opened == made.payload


def test_answers_stand_in_the_order_of_the_names(store: Store, arena: Arena, draw: random.Random) -> None:
    made = samples(draw, 40, 300)
    assert put_all(store, arena, made[::2]) == [True] * 20
    mixed = draw.sample(made, 40)
    there = {each.name for each in made[::2]}
    assert store.look([each.name for each in mixed]) == [each.name in there for each in mixed]
    assert fetched(store, arena, mixed) == [each.data if each.name in there else MISSING for each in mixed]


def test_calls_without_names_are_answered(store: Store) -> None:
    assert store.look([]) == []
    assert store.get([], []) == []
    assert store.put([], []) == []
    store.drop([])


def test_a_buffer_may_be_larger_and_only_its_beginning_is_written(store: Store, arena: Arena, draw: random.Random) -> None:
    made = sample(draw, 1000)
    put_all(store, arena, [made])
    into = arena.room(5000)
    into[:] = b"\xab" * 5000
    assert store.get([made.name], [into]) == [len(made.data)]
    assert into[: len(made.data)] == made.data
    assert into[len(made.data) :] == b"\xab" * (5000 - len(made.data))


def test_what_does_not_fit_is_said_and_spoils_no_other(store: Store, arena: Arena, draw: random.Random) -> None:
    small, large = sample(draw, 100), sample(draw, 3000)
    put_all(store, arena, [small, large])
    short, guard = arena.room(len(large.data) - 1), arena.of(b"\xcd" * 64)
    into = arena.room(len(small.data))
    assert store.get([large.name, small.name], [short, into]) == [OVERSIZED, len(small.data)]
    assert into == small.data
    assert guard == b"\xcd" * 64


def test_putting_again_is_well(store: Store, arena: Arena, draw: random.Random) -> None:
    made = samples(draw, 2)
    assert put_all(store, arena, made) == [True, True]
    assert put_all(store, arena, [*made, *made]) == [True] * 4
    assert fetched(store, arena, made) == [each.data for each in made]
    assert store.stat().objects == 2


def test_what_is_dropped_is_gone_and_may_come_again_otherwise(store: Store, arena: Arena, draw: random.Random) -> None:
    before, other = samples(draw, 2)
    after = sample(draw, key=before.key)
    put_all(store, arena, [before, other])
    store.drop([before.name, sample(draw).name])
    assert fetched(store, arena, [before, other]) == [MISSING, other.data]
    assert put_all(store, arena, [after]) == [True]
    assert fetched(store, arena, [after]) == [after.data]


def test_models_do_not_meet(store: Store, arena: Arena, draw: random.Random) -> None:
    ours = sample(draw)
    theirs = sample(draw, layout=OTHER_LAYOUT, key=ours.key)
    put_all(store, arena, [ours])
    assert store.look([ours.name, theirs.name]) == [True, False]
    put_all(store, arena, [theirs])
    assert fetched(store, arena, [ours, theirs]) == [ours.data, theirs.data]


def test_all_objects_are_listed_counted_and_cleared(store: Store, arena: Arena, draw: random.Random) -> None:
    made = [sample(draw, draw.randrange(3000)) for _ in range(30)]
    put_all(store, arena, made)
    assert sorted(store.names()) == sorted((each.name, len(each.data)) for each in made)
    told = store.stat()
    assert (told.kind, told.objects) == (store.kind, 30)
    assert told.bytes >= sum(len(each.data) for each in made)
    assert store.clear() == 30
    assert list(store.names()) == []
    assert fetched(store, arena, made) == [MISSING] * 30
    assert put_all(store, arena, made[:1]) == [True]


def test_another_client_finds_it(store: Store, url: str, arena: Arena, draw: random.Random) -> None:
    made = samples(draw, 3)
    put_all(store, arena, made)
    other, elsewhere = open_store(url, timeout_s=TIMEOUT_S), Arena(1 << 20)
    other.attach(elsewhere.whole)
    try:
        assert other.look([each.name for each in made]) == [True] * 3
        assert fetched(other, elsewhere, made) == [each.data for each in made]
        other.drop([made[0].name])
    finally:
        other.close()
    assert fetched(store, arena, made) == [MISSING, made[1].data, made[2].data]


def test_many_threads_at_once_see_whole_objects_or_none(store: Store, arena: Arena, draw: random.Random) -> None:
    shared = samples(draw, 8, 20_000)
    objects = [arena.of(each.data) for each in shared]
    buffers = [arena.room(len(objects[0])) for _ in range(6)]

    def work(thread: int) -> list[str]:
        own, into, wrong = random.Random(thread), buffers[thread], []
        for _ in range(30):
            at = own.randrange(8)
            name = shared[at].name
            match own.randrange(4):
                case 0:
                    store.drop([name])
                case 1:
                    wrong += [f"{name}: not stored"] if store.put([name], [objects[at]]) != [True] else []
                case _:
                    (count,) = store.get([name], [into])
                    other = count != MISSING and into[:count] != objects[at]
                    found = SERVED[store.kind].tears and isinstance(
                        unseal(shared[at].key, LAYOUT, into[:count]), EnvelopeFlaw
                    )
                    wrong += [f"{name}: {count} other bytes"] if other and not found else []
        return wrong

    with ThreadPoolExecutor(6) as threads:
        assert [wrong for each in threads.map(work, range(6)) for wrong in each] == []
