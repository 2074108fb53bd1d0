"""What every way to move KV must do, whatever carries the bytes and wherever the KV lies, on a device included.

A new kind joins by its name in `kv.contract.KINDS`.
"""

from __future__ import annotations

import contextlib
import gc
import os
import random
import re
import socket
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from baton.core.errors import InvariantViolated
from baton.core.handover.messages import Arriving, Fenced, ShipFailed, Shipped, TransferBroken, Verified
from baton.kv.shared_memory import release_pool
from baton.kv.transfer_contract import KvLayout, TransferUnavailable, available, make_receiver, make_sender
from baton.kv.transfer_frames import END_FRAME, HELLO_BYTES, encode_hello, encode_pieces
from baton.kv.transfer_mooncake import MooncakeSenderKind
from tests.support import transfers as support
from tests.support.transfers import (
    GIVER_BLOCKS,
    LAYERS,
    LAYOUT,
    TAKER_BLOCKS,
    TOKEN,
    HandLine,
    Pair,
    Reports,
    SenderProcess,
    checks_of,
    giver_names,
    ids,
    make_pool,
    pair_of,
    some_blocks,
    taker_names,
    usable_kinds,
)

pytestmark = pytest.mark.parametrize(("kind", "_place"), usable_kinds(), indirect=["_place"])


@pytest.fixture(scope="module", autouse=True)
def _engine_stays_up() -> Iterator[None]:
    """Mooncake's engine takes a second to stop; while somebody uses it, it stays."""
    if available("mooncake") is not None:
        yield
        return
    memory = make_pool(1)
    transport = MooncakeSenderKind(memory, "127.0.0.1")
    yield
    transport.close()
    release_pool(memory)


@pytest.fixture(autouse=True)
def _place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "PLACE", request.param)


@pytest.fixture
def pair(kind: str) -> Iterator[Pair]:
    with pair_of(kind) as made:
        yield made


def hand_over(pair: Pair, request: int, count: int = 6, first: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """A whole one, verified; what was sent from where to where."""
    sources, targets = some_blocks(count, GIVER_BLOCKS, request), some_blocks(count, TAKER_BLOCKS, request + 1)
    pair.receiver.expect(taker_names(request), TOKEN, first, targets)
    pair.sender.open(giver_names(request), pair.receiver.address, TOKEN, first, sources)
    pair.sender.ship(giver_names(request), None, first, first + count, True)
    pair.receiver.verify(taker_names(request), pair.sent.next(Shipped, giver_names(request)).checks)
    pair.got.next(Verified, taker_names(request))
    assert pair.arrived(sources, targets)
    return sources, targets


# ── delivery ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_everything_arrives_and_is_verified(pair: Pair) -> None:
    _, targets = hand_over(pair, 1, count=20)
    assert pair.receiver.arrived_bytes == 20 * LAYOUT.block_bytes
    assert pair.sender.sent_bytes >= 20 * LAYOUT.block_bytes
    untouched = np.setdiff1d(np.arange(TAKER_BLOCKS), targets)
    assert not pair.taker.pool[untouched].any()
    assert any(isinstance(event, Arriving) for event in pair.got.seen)


def test_only_what_follows_the_prefix_is_sent(pair: Pair) -> None:
    hand_over(pair, 1, count=3, first=1000)


def test_a_peer_that_was_started_anew_may_use_its_numbers_again(pair: Pair) -> None:
    for _ in range(2):
        hand_over(pair, 1)
        pair.sender.fence(giver_names(1))
        pair.sent.next(Fenced)


def test_a_hand_over_of_nothing_is_verified(pair: Pair) -> None:
    hand_over(pair, 1, count=0, first=7)


@pytest.mark.parametrize("seed", range(8))
def test_layers_chunks_and_signals_may_come_in_any_order(pair: Pair, seed: int) -> None:
    draw = random.Random(seed)
    sources, targets = some_blocks(12, GIVER_BLOCKS, seed), some_blocks(12, TAKER_BLOCKS, seed + 1)
    sender, handover = pair.sender, giver_names(1)
    pair.receiver.expect(taker_names(1), TOKEN, 5, targets)
    signals = [(step, layer) for step in (7, 8) for layer in range(LAYERS)]
    acts = [lambda step=step, layer=layer: sender.layer_done(step, layer) for step, layer in signals]
    acts.append(lambda: sender.open(handover, pair.receiver.address, TOKEN, 5, sources))
    chunks = [(None, 5, 8), (7, 8, 12), (8, 12, 17)]
    draw.shuffle(chunks)
    acts.append(lambda: [sender.ship(handover, *chunk, last=chunk is chunks[-1]) for chunk in chunks])
    draw.shuffle(acts)
    for act in acts:
        act()
    checks = pair.sent.next(Shipped).checks
    pair.receiver.verify(taker_names(1), checks)
    pair.got.next(Verified)
    assert pair.arrived(sources, targets)
    assert checks == checks_of(pair.giver, 5, sources)


def test_a_layer_leaves_when_it_is_signalled_and_not_before(pair: Pair) -> None:
    sources, targets = ids(3, 4), ids(8, 9)
    pair.receiver.expect(taker_names(1), TOKEN, 0, targets)
    pair.sender.layer_done(9, 0)
    pair.sender.open(giver_names(1), pair.receiver.address, TOKEN, 0, sources)
    pair.sender.ship(giver_names(1), 9, 0, 2, True)
    pair.got.next(Arriving)
    hand_over_elsewhere(pair, 2)  # time enough for the rest, if it were on its way
    end = LAYOUT.spans[0][1]
    assert (pair.giver.pool[sources, :end] == pair.taker.pool[targets, :end]).all()
    assert not pair.taker.pool[targets, end:].any()
    pair.sender.step_done(9)
    pair.receiver.verify(taker_names(1), pair.sent.next(Shipped).checks)
    pair.got.next(Verified)
    assert pair.arrived(sources, targets)


def test_an_order_for_a_step_that_is_over_is_ready(pair: Pair) -> None:
    pair.sender.step_done(4)
    pair.receiver.expect(taker_names(1), TOKEN, 0, ids(1))
    pair.sender.open(giver_names(1), pair.receiver.address, TOKEN, 0, ids(1))
    pair.sender.ship(giver_names(1), 3, 0, 1, True)
    pair.sent.next(Shipped)


def test_many_hand_overs_at_once_do_not_mix(pair: Pair) -> None:
    requests = range(1, 9)
    sources, targets = some_blocks(40, GIVER_BLOCKS, 3).reshape(8, 5), some_blocks(40, TAKER_BLOCKS, 4).reshape(8, 5)
    tokens = {request: bytes([request]) * 16 for request in requests}
    for request in requests:
        pair.receiver.expect(taker_names(request), tokens[request], 0, targets[request - 1])
        pair.sender.open(giver_names(request), pair.receiver.address, tokens[request], 0, sources[request - 1])
    for chunk in range(5):
        for request in requests:
            pair.sender.ship(giver_names(request), chunk, chunk, chunk + 1, chunk == 4)
        pair.sender.step_done(chunk)
    shipped = [pair.sent.next(Shipped) for _ in requests]
    for event in shipped:
        pair.receiver.verify(taker_names(event.handover.request), event.checks)
    assert {pair.got.next(Verified).handover.request for _ in requests} == set(requests)
    assert pair.arrived(sources.ravel(), targets.ravel())


def test_checks_may_be_asked_for_before_anything_comes(pair: Pair) -> None:
    pair.receiver.expect(taker_names(1), TOKEN, 0, ids(7, 9))
    pair.receiver.verify(taker_names(1), checks_of(pair.giver, 0, ids(1, 2)))
    pair.sender.open(giver_names(1), pair.receiver.address, TOKEN, 0, ids(1, 2))
    pair.sender.ship(giver_names(1), None, 0, 2, True)
    pair.got.next(Verified)
    assert pair.arrived(ids(1, 2), ids(7, 9))


def test_without_checks_everything_still_arrives(kind: str) -> None:
    with pair_of(kind, {"verified": False}, {"verified": False, "bytes_per_s": 1e9}) as pair:
        hand_over(pair, 1, count=20)


# ── what is wrong with it ────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_flipped_byte_is_found(pair: Pair) -> None:
    told = checks_of(pair.giver, 0, ids(1, 2))
    pair.giver.pool[2, LAYOUT.spans[3][0]] ^= 1
    pair.receiver.expect(taker_names(1), TOKEN, 0, ids(7, 9))
    pair.sender.open(giver_names(1), pair.receiver.address, TOKEN, 0, ids(1, 2))
    pair.sender.ship(giver_names(1), None, 0, 2, True)
    pair.sent.next(Shipped)
    pair.receiver.verify(taker_names(1), told)
    assert "differs" in pair.got.next(TransferBroken).reason


@pytest.mark.parametrize("checks", [b"", b"\0" * 15, b"\0" * 16, b"\0" * 24])
def test_checks_that_are_none_spoil_it(pair: Pair, checks: bytes) -> None:
    pair.receiver.expect(taker_names(1), TOKEN, 0, ids(7, 9))
    pair.receiver.verify(taker_names(1), checks)
    pair.sender.open(giver_names(1), pair.receiver.address, TOKEN, 0, ids(1, 2))
    pair.sender.ship(giver_names(1), None, 0, 2, True)
    pair.got.next(TransferBroken)


def test_blocks_in_the_wrong_place_are_found(pair: Pair) -> None:
    pair.receiver.expect(taker_names(1), TOKEN, 0, ids(7, 9))
    pair.sender.open(giver_names(1), pair.receiver.address, TOKEN, 0, ids(2, 1))
    pair.sender.ship(giver_names(1), None, 0, 2, True)
    pair.sent.next(Shipped)
    pair.receiver.verify(taker_names(1), checks_of(pair.giver, 0, ids(1, 2)))
    pair.got.next(TransferBroken)


def test_verifying_what_is_not_expected_spoils_it(pair: Pair) -> None:
    pair.receiver.verify(taker_names(1), b"")
    pair.got.next(TransferBroken)


# ── tokens ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_wrong_token_opens_nothing_and_costs_the_right_one_nothing(pair: Pair) -> None:
    pair.receiver.expect(taker_names(1), TOKEN, 0, ids(7))
    pair.sender.open(giver_names(1, 1), pair.receiver.address, TOKEN[::-1], 0, ids(1))
    assert "turned us away" in pair.sent.next(ShipFailed).reason
    assert pair.receiver.refused["wrong token"] == 1
    line = HandLine(pair.kind, pair.giver, pair.receiver.address)
    line.hello(1, TOKEN, ids(1))
    assert line.welcomed()
    line.close()
    pair.got.next(TransferBroken)


def test_a_token_opens_one_line_once(pair: Pair) -> None:
    pair.receiver.expect(taker_names(1), TOKEN, 0, ids(7))
    lines = [HandLine(pair.kind, pair.giver, pair.receiver.address) for _ in range(2)]
    lines[0].hello(1, TOKEN, ids(1))
    assert lines[0].welcomed()
    lines[1].hello(1, TOKEN, ids(1))
    assert lines[1].hung_up_on()
    assert pair.receiver.refused["token used"] == 1
    for line in lines:
        line.close()


def test_a_token_is_worth_nothing_after_its_hand_over(pair: Pair) -> None:
    hand_over(pair, 1)
    line = HandLine(pair.kind, pair.giver, pair.receiver.address)
    line.hello(1, TOKEN, ids(1))
    assert line.hung_up_on()
    assert pair.receiver.refused["not expected"] == 1
    line.close()


def test_another_layout_is_turned_away(pair: Pair) -> None:
    pair.receiver.expect(taker_names(1), TOKEN, 0, ids(7))
    other = KvLayout(b"another model", LAYOUT.dtype, LAYOUT.block_size, LAYOUT.layer_bytes)
    line = HandLine(pair.kind, pair.giver, pair.receiver.address)
    line.hello(1, TOKEN, ids(1), other.digest)
    assert line.hung_up_on()
    assert pair.receiver.refused["different layout"] == 1
    line.close()


# ── fences ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_after_fenced_not_one_byte_changes_whatever_the_sender_does(pair: Pair) -> None:
    sources, targets = ids(*range(20)), ids(*range(20, 40))
    pair.receiver.expect(taker_names(1), TOKEN, 0, targets)
    pair.sender.open(giver_names(1), pair.receiver.address, TOKEN, 0, sources)
    pair.sender.ship(giver_names(1), None, 0, 10, False)
    pair.got.next(Arriving)
    pair.receiver.fence(taker_names(1))
    pair.got.next(Fenced)
    pair.taker.pool[targets] = 99
    pair.sender.ship(giver_names(1), None, 10, 20, True)
    assert isinstance(pair.sent.next(ShipFailed | Shipped), ShipFailed)
    hand_over_elsewhere(pair, 2)
    assert (pair.taker.pool[targets] == 99).all()


def test_a_fence_in_the_middle_of_a_piece_cuts_it_off(pair: Pair) -> None:
    targets = ids(*range(20, 40))
    pair.receiver.expect(taker_names(1), TOKEN, 0, targets)
    line = HandLine(pair.kind, pair.giver, pair.receiver.address)
    line.hello(1, TOKEN, ids(*range(20)))
    assert line.welcomed()
    line.pieces(range(2), 0, ids(*range(10)))
    line.pieces(range(2, LAYERS), 0, ids(*range(10)), part=0.5)
    pair.got.next(Arriving)
    pair.receiver.fence(taker_names(1))
    pair.got.next(Fenced)
    pair.taker.pool[targets] = 99
    assert line.hung_up_on()
    hand_over_elsewhere(pair, 2)
    assert (pair.taker.pool[targets] == 99).all()
    line.close()


def test_what_a_line_says_at_random_lands_nowhere_but_where_it_may(pair: Pair) -> None:
    draw = random.Random(7)
    targets = ids(*range(20, 40))
    for request in range(1, 31):
        pair.receiver.expect(taker_names(request), TOKEN, 5, targets)
        line = HandLine(pair.kind, pair.giver, pair.receiver.address)
        line.hello(request, TOKEN, ids(*range(20)))
        assert line.welcomed()
        with contextlib.suppress(ConnectionError):  # it may have been hung up on
            for _ in range(draw.randrange(4)):
                layers = range(*sorted(draw.sample(range(LAYERS + 1), 2)))
                begin, end = sorted(draw.sample(range(21), 2))
                line.pieces(layers, 5 + begin, ids(*range(begin, end)), part=draw.choice([1.0, 1.0, 0.6]))
            line.sock.sendall(draw.randbytes(64))
        line.close()
        pair.got.next(TransferBroken)
    assert not np.delete(pair.taker.pool, targets, axis=0).any()
    hand_over_elsewhere(pair, 99)


def hand_over_elsewhere(pair: Pair, request: int) -> None:
    """When this is through, whatever came before it would be too."""
    pair.receiver.expect(taker_names(request), TOKEN, 0, ids(1, 2))
    pair.sender.open(giver_names(request), pair.receiver.address, TOKEN, 0, ids(1, 2))
    pair.sender.ship(giver_names(request), None, 0, 2, True)
    pair.receiver.verify(taker_names(request), pair.sent.next(Shipped, giver_names(request)).checks)
    pair.got.next(Verified, taker_names(request))


def test_fences_are_always_answered(pair: Pair) -> None:
    for names, side, reports in ((taker_names, pair.receiver, pair.got), (giver_names, pair.sender, pair.sent)):
        for _ in range(2):
            side.fence(names(77))
            assert reports.next(Fenced).handover == names(77)
    hand_over(pair, 1)
    pair.receiver.fence(taker_names(1))
    pair.got.next(Fenced)
    pair.sender.fence(giver_names(1))
    pair.sent.next(Fenced)


def test_a_fence_before_the_line_opens_closes_the_door(pair: Pair) -> None:
    pair.receiver.expect(taker_names(1), TOKEN, 0, ids(7))
    pair.receiver.fence(taker_names(1))
    pair.got.next(Fenced)
    pair.sender.open(giver_names(1), pair.receiver.address, TOKEN, 0, ids(1))
    pair.sent.next(ShipFailed)
    assert not pair.taker.pool.any()


def test_a_fenced_sender_sends_nothing_more(pair: Pair) -> None:
    pair.receiver.expect(taker_names(1), TOKEN, 0, ids(7, 8))
    pair.sender.open(giver_names(1), pair.receiver.address, TOKEN, 0, ids(1, 2))
    pair.sender.ship(giver_names(1), None, 0, 1, False)
    pair.got.next(Arriving)
    pair.sender.fence(giver_names(1))
    pair.sent.next(Fenced)
    pair.sender.ship(giver_names(1), None, 1, 2, True)
    pair.got.next(TransferBroken)
    hand_over_elsewhere(pair, 2)
    assert not pair.taker.pool[8].any()


# ── the other side goes ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_sender_that_goes_midway_spoils_it(pair: Pair) -> None:
    pair.receiver.expect(taker_names(1), TOKEN, 0, ids(7, 8))
    pair.sender.open(giver_names(1), pair.receiver.address, TOKEN, 0, ids(1, 2))
    pair.sender.ship(giver_names(1), None, 0, 1, False)
    pair.got.next(Arriving)
    pair.sender.close()
    pair.got.next(TransferBroken)
    pair.sent.next(ShipFailed)


def test_a_receiver_that_goes_fails_the_shipment(pair: Pair) -> None:
    pair.receiver.expect(taker_names(1), TOKEN, 0, ids(7, 8))
    pair.sender.open(giver_names(1), pair.receiver.address, TOKEN, 0, ids(1, 2))
    pair.sender.ship(giver_names(1), None, 0, 1, False)
    pair.got.next(Arriving)
    pair.receiver.close()
    pair.sent.next(ShipFailed)
    pair.got.next(TransferBroken)
    pair.sender.open(giver_names(2), pair.receiver.address, TOKEN, 0, ids(1))
    reason = pair.sent.next(ShipFailed).reason
    assert "cannot connect" in reason
    assert pair.receiver.address.partition(":")[2] not in reason


@pytest.mark.parametrize(
    "address", ["", "tcp", "tcp:", "tcp:127.0.0.1:0", "shm:/nowhere/at/all", "mooncake:localhost:99999", "tcp:a.name:80"]
)
def test_an_address_that_leads_nowhere_fails_the_shipment(pair: Pair, address: str) -> None:
    pair.sender.open(giver_names(1), address, TOKEN, 0, ids(1))
    pair.sent.next(ShipFailed)


def test_a_receiver_that_never_answers_fails_the_shipment(kind: str) -> None:
    with tempfile.TemporaryDirectory() as folder, pair_of(kind, sender={"stall_s": 0.1}) as pair:
        path = str(Path(folder) / "deaf")
        deaf = socket.socket(socket.AF_UNIX if kind == "shm" else socket.AF_INET)
        deaf.bind(path if kind == "shm" else ("127.0.0.1", 0))
        deaf.listen()
        address = f"shm:{path}" if kind == "shm" else f"{kind}:127.0.0.1:{deaf.getsockname()[1]}"
        pair.sender.open(giver_names(1), address, TOKEN, 0, ids(1))
        assert "took nothing" in pair.sent.next(ShipFailed).reason
        deaf.close()


def test_half_a_piece_that_stays_half_spoils_it(kind: str) -> None:
    with pair_of(kind, {"stall_s": 0.1}) as pair:
        pair.receiver.expect(taker_names(1), TOKEN, 0, ids(7, 8))
        line = HandLine(kind, pair.giver, pair.receiver.address)
        line.hello(1, TOKEN, ids(1, 2))
        assert line.welcomed()
        line.pieces(range(2), 0, ids(1, 2), part=0.7)
        assert "half of a piece" in pair.got.next(TransferBroken).reason
        line.close()


# ── in processes of their own ────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def giver_process(kind: str) -> Iterator[SenderProcess]:
    process = SenderProcess(kind)
    yield process
    process.resume()
    process.kill()


def test_between_two_processes_everything_arrives(pair: Pair, giver_process: SenderProcess) -> None:
    sources, targets = some_blocks(20, GIVER_BLOCKS, 5), some_blocks(20, TAKER_BLOCKS, 6)
    for request in (1, 2):
        pair.receiver.expect(taker_names(request), TOKEN, 3, targets)
        giver_process.tell("open", request, pair.receiver.address, TOKEN.hex(), 3, sources.tolist())
        giver_process.tell("ship", request, None, 3, 23, True)
        event, checks = giver_process.hear()
        assert event == "Shipped", checks
        pair.receiver.verify(taker_names(request), bytes.fromhex(checks))
        pair.got.next(Verified)
        assert pair.arrived(sources, targets)


def test_kill_9_of_the_sender_midway_spoils_it_and_the_receiver_serves_on(pair: Pair, giver_process: SenderProcess) -> None:
    pair.receiver.expect(taker_names(1), TOKEN, 0, ids(7, 8))
    giver_process.tell("open", 1, pair.receiver.address, TOKEN.hex(), 0, [1, 2])
    giver_process.tell("ship", 1, None, 0, 1, False)
    pair.got.next(Arriving)
    giver_process.kill()
    pair.got.next(TransferBroken)
    hand_over(pair, 2)


def test_a_sender_that_wakes_up_after_the_fence_writes_nothing(pair: Pair, giver_process: SenderProcess) -> None:
    targets = ids(*range(20, 40))
    pair.receiver.expect(taker_names(1), TOKEN, 0, targets)
    giver_process.tell("open", 1, pair.receiver.address, TOKEN.hex(), 0, list(range(20)))
    giver_process.tell("ship", 1, None, 0, 10, False)
    pair.got.next(Arriving)
    giver_process.pause()
    pair.receiver.fence(taker_names(1))
    pair.got.next(Fenced)
    pair.taker.pool[targets] = 99
    giver_process.tell("ship", 1, None, 10, 20, True)
    giver_process.resume()
    assert giver_process.hear()[0] == "ShipFailed"
    hand_over_elsewhere(pair, 2)
    assert (pair.taker.pool[targets] == 99).all()


# ── who speaks out of turn ───────────────────────────────────────────────────────────────────────────────────────────────


def _say(pair: Pair, data: bytes) -> HandLine:
    line = HandLine(pair.kind, pair.giver, pair.receiver.address)
    line.sock.sendall(data)
    return line


def test_garbage_is_refused_and_counted_and_the_receiver_serves_on(pair: Pair) -> None:
    draw = random.Random(0)
    for number in range(40):
        line = _say(pair, draw.randbytes(HELLO_BYTES + draw.randrange(200)))
        assert line.hung_up_on()
        line.close()
        assert pair.receiver.refused["no hello"] == number + 1
    hand_over(pair, 1)


@pytest.mark.parametrize("size", [0, 1, HELLO_BYTES - 1])
def test_a_hello_that_is_cut_off_is_counted(pair: Pair, size: int) -> None:
    hello = encode_hello(pair.kind, giver_names(1), LAYOUT.digest, TOKEN)
    _say(pair, hello[:size]).close()
    hand_over(pair, 2)
    assert pair.receiver.refused.total() == 1


def test_who_says_nothing_is_hung_up_on(kind: str) -> None:
    with pair_of(kind, {"hello_s": 0.05}) as pair:
        line = _say(pair, b"B")
        assert line.hung_up_on()
        assert pair.receiver.refused["no hello in time"] == 1
        hand_over(pair, 1)
        line.close()


def test_strangers_are_few_and_keep_nobody_out(kind: str) -> None:
    with pair_of(kind, {"strangers_max": 3}) as pair:
        lines = [_say(pair, b"B") for _ in range(4)]
        assert lines[0].hung_up_on()
        assert pair.receiver.refused["too many strangers"] == 1
        hand_over(pair, 1)
        for line in lines:
            line.close()


@pytest.mark.parametrize(
    ("frame", "reason"),
    [
        (encode_pieces(range(1), 9, 1), "block out of range"),
        (encode_pieces(range(1), 12, 1), "block out of range"),
        (encode_pieces(range(1), 10, 3), "block out of range"),
        (encode_pieces(range(1), 10, 0), "block out of range"),
        (encode_pieces(range(1), 10, 2**32 - 1), "block out of range"),
        (encode_pieces(range(1), 2**32 - 1, 2**32 - 1), "block out of range"),
        (encode_pieces(range(LAYERS + 1), 10, 1), "layer out of range"),
        (encode_pieces(range(LAYERS, LAYERS + 1), 10, 1), "layer out of range"),
        (encode_pieces(range(2, 1), 10, 1), "layer out of range"),
        (encode_pieces(range(2, 2), 10, 1), "layer out of range"),
        (bytes([9]) * 16, "no frame"),
        (END_FRAME, "ended before everything was sent"),
    ],
    ids=lambda value: value.hex() if isinstance(value, bytes) else None,
)
def test_a_range_that_is_not_expected_is_refused(pair: Pair, frame: bytes, reason: str) -> None:
    pair.receiver.expect(taker_names(1), TOKEN, 10, ids(7, 8))
    line = HandLine(pair.kind, pair.giver, pair.receiver.address)
    line.hello(1, TOKEN, ids(1, 2))
    assert line.welcomed()
    line.sock.sendall(frame)
    assert reason in pair.got.next(TransferBroken).reason
    assert pair.receiver.refused[reason] == 1
    assert line.hung_up_on()
    assert not pair.taker.pool.any()
    hand_over(pair, 2)
    line.close()


def test_a_piece_that_comes_twice_is_refused(pair: Pair) -> None:
    pair.receiver.expect(taker_names(1), TOKEN, 10, ids(7, 8))
    line = HandLine(pair.kind, pair.giver, pair.receiver.address)
    line.hello(1, TOKEN, ids(1, 2))
    assert line.welcomed()
    line.pieces(range(2), 10, ids(1, 2))
    line.sock.sendall(encode_pieces(range(1, 3), 11, 1))
    pair.got.next(TransferBroken)
    assert pair.receiver.refused["piece came twice"] == 1
    line.close()


def test_who_speaks_after_the_end_is_refused(pair: Pair) -> None:
    pair.receiver.expect(taker_names(1), TOKEN, 10, ids(7))
    line = HandLine(pair.kind, pair.giver, pair.receiver.address)
    line.hello(1, TOKEN, ids(1))
    assert line.welcomed()
    line.pieces(range(LAYERS), 10, ids(1))
    line.sock.sendall(END_FRAME + b"!")
    assert line.hung_up_on()
    assert pair.receiver.refused["spoke after the end"] == 1
    line.close()


# ── bounds, and leaving ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_full_receiver_refuses_more(kind: str) -> None:
    with pair_of(kind, {"expected_max": 1}) as pair:
        pair.receiver.expect(taker_names(1), TOKEN, 0, ids(7))
        pair.receiver.expect(taker_names(2), TOKEN, 0, ids(8))
        assert pair.got.next(TransferBroken).handover == taker_names(2)


def test_a_full_sender_fails_more(kind: str) -> None:
    with pair_of(kind, sender={"handovers_max": 1}) as pair:
        pair.receiver.expect(taker_names(1), TOKEN, 0, ids(7))
        pair.sender.open(giver_names(1), pair.receiver.address, TOKEN, 0, ids(1))
        pair.sender.open(giver_names(2), pair.receiver.address, TOKEN, 0, ids(2))
        assert pair.sent.next(ShipFailed).handover == giver_names(2)


@pytest.mark.parametrize("token", [b"", b"t" * 65])
def test_a_token_of_no_size_is_our_own_mistake(pair: Pair, token: bytes) -> None:
    with pytest.raises(InvariantViolated):
        pair.receiver.expect(taker_names(1), token, 0, ids(1))
    with pytest.raises(InvariantViolated):
        pair.sender.open(giver_names(1), pair.receiver.address, token, 0, ids(1))


@pytest.mark.parametrize("block", [-1, TAKER_BLOCKS])
def test_blocks_that_we_do_not_have_are_our_own_mistake(pair: Pair, block: int) -> None:
    with pytest.raises(InvariantViolated):
        pair.receiver.expect(taker_names(1), TOKEN, 0, ids(block))
    with pytest.raises(InvariantViolated):
        pair.sender.open(giver_names(1), pair.receiver.address, TOKEN, 0, ids(block))


@pytest.mark.parametrize(
    "orders",
    [[(0, 3, True)], [(0, 1, True)], [(0, 1, False), (0, 2, True)], [(0, 2, True), (2, 3, False)], [(-1, 1, False)]],
)
def test_orders_that_do_not_fit_fail_the_shipment(pair: Pair, orders: list[tuple[int, int, bool]]) -> None:
    pair.sender.open(giver_names(1), pair.receiver.address, TOKEN, 0, ids(1, 2))
    for first, upto, last in orders:
        pair.sender.ship(giver_names(1), 5, first, upto, last)
    pair.sent.next(ShipFailed)


def _held(kind: str) -> Counter[str]:
    """Threads, descriptors and maps. Sockets of mooncake's engine come and go as it likes: there none are counted."""
    gc.collect()
    held = Counter(thread.name for thread in threading.enumerate() if thread.name.startswith("kv-"))
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            held[os.readlink(f"/proc/self/fd/{entry}")] += 1
    held["maps"] = len(re.findall("memfd:baton-kv", Path("/proc/self/maps").read_text()))
    return Counter({name: count for name, count in held.items() if kind != "mooncake" or not name.startswith("socket:")})


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
def test_closing_leaves_no_threads_descriptors_or_maps(kind: str) -> None:
    with pair_of(kind) as pair:  # what the libraries open once
        hand_over(pair, 1)
    del pair
    before = _held(kind)
    with pair_of(kind) as pair:
        hand_over(pair, 1)
        pair.receiver.expect(taker_names(2), TOKEN, 0, ids(7, 8))
        pair.sender.open(giver_names(2), pair.receiver.address, TOKEN, 0, ids(1, 2))
        pair.sender.ship(giver_names(2), None, 0, 1, False)
        pair.got.next(Arriving)
        line = _say(pair, b"B")
        line.close()
        assert _held(kind) - before
    address = pair.receiver.address
    del pair, line
    assert _held(kind) - before == Counter()
    if kind == "shm":
        assert not Path(address.removeprefix("shm:")).parent.exists()


def test_what_is_ordered_after_closing_is_answered(kind: str) -> None:
    with pair_of(kind) as pair:
        pair.sender.close()
        pair.receiver.close()
        pair.sender.open(giver_names(1), pair.receiver.address, TOKEN, 0, ids(1))
        pair.sent.next(ShipFailed)
        pair.sender.fence(giver_names(1))
        pair.sent.next(Fenced)
        pair.receiver.expect(taker_names(1), TOKEN, 0, ids(1))
        pair.got.next(TransferBroken)
        pair.receiver.fence(taker_names(1))
        pair.got.next(Fenced)


def test_a_kind_that_there_is_not_says_which_there_are(kind: str) -> None:
    with pytest.raises(TransferUnavailable, match=kind):
        make_receiver("pigeons", make_pool(1), Reports())
    with pytest.raises(TransferUnavailable, match=kind):
        make_sender("pigeons", make_pool(1), Reports())
