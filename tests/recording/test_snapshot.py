"""Snapshots: what comes back is what went in, whatever it refers to; and nothing but our own classes comes back."""

from __future__ import annotations

import contextlib
from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core.config import WorkerConfig
from baton.core.content_hashes import ContentHashes
from baton.core.engine.change_journal import NO_KEYS_CHANGED
from baton.core.engine.plan import Chunk
from baton.core.engine.records import Request
from baton.core.engine.request import NO_TOKENS, Phase, RequestId, Sampling, Serial, Submission, frozen_tokens
from baton.core.engine.waiting_queue import WaitingQueue
from baton.core.engine.worker import Tick, Worker
from baton.wire.captured_state import capture, encode_state
from baton.wire.snapshot import (
    FORMAT,
    BadSnapshot,
    CannotSnapshot,
    decode_value,
    encode_value,
    restore,
    snapshot,
    state_of,
)
from tests.laws.test_preemption_laws import Machine, shapes

HASHES = ContentHashes(b"")

scalars = st.none() | st.booleans() | st.integers(-(1 << 80), 1 << 80) | st.floats(allow_nan=False) | st.text() | st.binary()
values = st.recursive(
    scalars | st.sampled_from([Phase.WAITING, Chunk(1, 2, 3, 4, True), Tick(), Sampling(3, stop_token_ids=(1, 2))]),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.integers() | st.text(), inner)
    | st.lists(st.tuples(st.integers(), st.binary())) | st.builds(deque, st.lists(inner)),
    max_leaves=20,
)  # fmt: skip


@given(values)
def test_a_value_comes_back_as_it_was(value: Any) -> None:
    assert restore(snapshot(value), HASHES) == value
    assert decode_value(encode_value(value)) == value
    assert type(restore(snapshot(value), HASHES)) is type(value)


@given(st.sets(st.integers() | st.text()), st.randoms())
def test_equal_sets_are_written_alike_whatever_their_order(members: set[Any], draws: Any) -> None:
    shuffled = draws.sample(sorted(members, key=repr), len(members))
    assert snapshot(set(shuffled)) == snapshot(members)
    assert restore(snapshot(frozenset(members)), HASHES) == members


def test_order_defaults_and_counts_of_dictionaries_come_back() -> None:
    ordered = OrderedDict([(3, "c"), (1, "a"), (2, "b")])
    ordered.move_to_end(3)
    lists: defaultdict[str, list[int]] = defaultdict(Tick)  # type: ignore[arg-type]
    counts = Counter({"a": 2})
    back = restore(snapshot([ordered, lists, counts, deque([1, 2], maxlen=2)]), HASHES)
    assert list(back[0].items()) == [(1, "a"), (2, "b"), (3, "c")]
    assert back[0].popitem(last=False) == (1, "a")
    assert isinstance(back[1]["new"], Tick)
    assert back[2]["missing"] == 0
    back[3].append(3)
    assert list(back[3]) == [2, 3]


def test_arrays_keep_type_shape_and_whether_they_may_be_written() -> None:
    table, fixed = np.arange(6, dtype=np.int8).reshape(2, 3), frozen_tokens([1, 2])
    back = restore(snapshot([table[:, ::2], fixed, np.int64(7), np.empty((0, 3), dtype=np.float32)]), HASHES)
    np.testing.assert_array_equal(back[0], table[:, ::2])
    assert back[0].dtype == np.int8
    back[0][0, 0] = 9
    assert not back[1].flags.writeable
    assert (back[2], type(back[2])) == (7, np.int64)
    assert back[3].shape == (0, 3)


def request(serial: int) -> Request:
    item = Submission(RequestId(f"r{serial}"), frozen_tokens([1, 2, 3]), Sampling(0))
    return Request(Serial(serial), item, 8, [], 0)


def test_shared_references_cycles_and_constants_stay_what_they_are() -> None:
    leader, follower = request(0), request(1)
    leader.followers.append(follower)
    follower.leader = leader
    one, again, its = restore(snapshot((leader, leader, follower)), HASHES)
    assert one is again
    assert its.leader is one
    assert one.followers == [its]
    assert one.outputs is NO_TOKENS
    assert restore(snapshot([NO_KEYS_CHANGED]), HASHES)[0] is NO_KEYS_CHANGED


def test_a_graph_may_be_deeper_than_the_stack() -> None:
    first = last = request(0)
    for serial in range(1, 5000):
        last.leader = request(serial)
        last = last.leader
    back = restore(snapshot(first), HASHES)
    for _ in range(4999):
        back = back.leader
    assert back.serial == 4999


def test_methods_are_bound_to_the_restored_object() -> None:
    queue, keys = WaitingQueue(), {b"a": 1}
    its_queue, push, its_keys, view = restore(snapshot([queue, queue.push, keys, keys.keys]), HASHES)
    its_keys[b"b"] = 2
    assert list(view()) == [b"a", b"b"]
    assert push.__self__ is its_queue


class Stranger:
    pass


@pytest.mark.parametrize("value", [Stranger(), print, pytest, [].append, np.array([None]), lambda: 0, Stranger])
def test_what_is_not_ours_cannot_be_in_a_snapshot(value: object) -> None:
    with pytest.raises(CannotSnapshot):
        snapshot([value])


def written(root: object, bodies: list[Any] | None = None, classes: list[Any] | None = None, version: int = FORMAT) -> bytes:
    return msgspec.msgpack.encode((version, classes or [], root, bodies or []))


@pytest.mark.parametrize(
    "data",
    [
        b"", b"\xff", msgspec.msgpack.encode([1, 2]), written(1, version=FORMAT + 1),
        written([0, 7]), written([99]), written([3, 0, "X"]), written([0, 0], [[28, 0]]), written([0, 0], [[77]]),
        written([0, 0], [[28, 0, 1]], [["os", "system", []]]),
        written([0, 0], [[28, 0, 1]], [["baton.wire.snapshot", "importlib", []]]),
        written([0, 0], [[28, 0]], [["baton.wire.snapshot", "importlib.import_module", []]]),
        written([0, 0], [[28, 0]], [["baton.core.errors", "InvariantViolated", []]]),
        written([0, 0], [[28, 0]], [["baton.core.errors", "NoSuchClass", []]]),
        written([0, 0], [[28, 0, 1]], [["baton.core.engine.plan", "StepPlan", ["no_such_field"]]]),
        written([0, 0], [[27, "|O", [1], b"12345678", True]]), written([0, 0], [[27, "<i4", [9], b"1234", True]]),
        written([7, [0, 0], "clear"], [[23, 0]]), written([8, "baton.wire.snapshot", "BadSnapshot"]),
        written([13, "baton.wire.snapshot", "importlib"]), written([4, bytes(5000)]), written([6]),
    ],
)  # fmt: skip
def test_what_is_no_snapshot_is_refused_with_a_reason(data: bytes) -> None:
    with pytest.raises(BadSnapshot):
        decode_value(data)


@given(st.data())
def test_damaged_bytes_give_an_error_or_a_value_but_never_anything_else(data: st.DataObject) -> None:
    good = bytearray(snapshot([request(0), Chunk(1, 2, 3, 4, True), {b"a": Phase.WAITING}]))
    for _ in range(data.draw(st.integers(1, 4))):
        good[data.draw(st.integers(0, len(good) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(BadSnapshot):
        restore(bytes(good), HASHES)


@settings(max_examples=15, deadline=None)
@given(shapes(), st.integers(0, 1 << 30), st.integers(1, 120))
def test_a_restored_worker_decides_as_the_live_one(config: WorkerConfig, seed: int, after: int) -> None:
    machine = Machine(config, seed, Counter())
    for _ in range(after):
        machine.event(machine.draws.random())
    live: Worker = machine.driver.worker
    before = state_of(live)
    twin: Worker = restore(snapshot(live), live.hashes)
    assert state_of(live) == before, "taking a snapshot changes nothing"
    handle = live.handle

    def both(event: Any, now_us: int) -> Any:
        effects = handle(event, now_us)
        assert encode_value(twin.handle(event, now_us)) == encode_value(effects)
        assert twin.next_deadline() == live.next_deadline()
        return effects

    live.handle = both  # type: ignore[method-assign]
    for _ in range(60):
        machine.event(machine.draws.random())
    machine.driver.run()
    del live.handle
    assert state_of(twin) == state_of(live)


@settings(max_examples=15, deadline=None)
@given(shapes(), st.integers(0, 1 << 30), st.integers(1, 120))
def test_a_captured_state_stays_as_it_was(config: WorkerConfig, seed: int, after: int) -> None:
    machine = Machine(config, seed, Counter())
    previous = capture(machine.driver.worker)
    for _ in range(after):
        machine.event(machine.draws.random())
    then, state = snapshot(machine.driver.worker), capture(machine.driver.worker, previous)
    for _ in range(60):
        machine.event(machine.draws.random())
    machine.driver.run()
    assert encode_state(state) == then
    assert snapshot(machine.driver.worker) != then


def test_all_that_can_change_is_captured() -> None:
    one, array, heap = request(1), np.zeros(3, np.int32), [(number, number) for number in range(2000)]
    view = array[:2]
    view.setflags(write=False)
    root = [
        [1, [2]], {1: [3]}, deque([[4]], maxlen=3), {5}, bytearray(b"6"), (7, [8]), [(9, one)], array, view, heap,
        defaultdict(None, {1: [10]}), Counter("a"), OrderedDict({1: {2: [11]}}), {"of": root_values}.values,
    ]  # fmt: skip
    then, state = snapshot(root), capture(root)
    root[0][1].append(0)
    root[1][1].append(0)
    root[2][0].append(0)
    root[3].add(0)
    root[4].append(0)
    root[5][1].append(0)
    one.keys.append(b"new")
    one.epoch = 5
    array[:] = 1
    heap[7] = (0, 0)
    root[10][1].append(0)
    root[11]["b"] = 5
    root[12][1][2].append(0)
    root_values.append(0)
    root.append(0)
    assert encode_state(state) == then
    root_values.clear()


root_values: list[int] = []


def test_a_list_that_was_plain_and_is_not_any_more_is_no_snapshot() -> None:
    numbers: list[Any] = list(range(2000))
    previous = capture([numbers])
    numbers.append([1])
    with pytest.raises(CannotSnapshot, match="not captured"):
        encode_state(capture([numbers], previous))
    assert encode_state(capture([numbers])) == snapshot([numbers])


def test_a_snapshot_of_idle_slots_does_not_grow_with_the_longest_sequence() -> None:
    small, large = (
        Machine(WorkerConfig(slots=64, blocks=64, context_tokens=tokens), 0, Counter()) for tokens in (64, 1 << 16)
    )
    assert len(snapshot(large.driver.worker)) < 2 * len(snapshot(small.driver.worker))
