"""An instance under a router, over real sockets: joins, sends heartbeats, serves attempts, keeps those of a lost router,
leaves."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import signal
import socket
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace

import httpx2 as httpx
import pytest

from baton.core.engine.orders import Accepted, Cancel, Drain, ReportChanges, Submit
from baton.core.engine.prefix import KEY_BYTES
from baton.core.engine.request import FinishReason, frozen_tokens
from baton.core.routing.events import Join
from baton.node import router_membership as membership_module
from baton.node.clock import monotonic_us
from baton.node.router_membership import InstanceFenced, RouterAddress, RouterMembership
from baton.node.service import default_name
from baton.wire.engine_messages import PrefillPeerAddresses, Pulse, ToEngine
from baton.wire.heartbeats import NO_GAUGES
from baton.wire.held_choices import (
    CHOICES_MAX,
    ENDED_BYTES_MAX,
    ENDED_CHOICES_MAX,
    FIRST_ROUTED_TICKET,
    GROUP_BYTES_MAX,
)
from baton.wire.instance_sessions import WELCOME_US, InstanceSessions
from baton.wire.router_messages import (
    HELD_BYTES_MAX,
    HELD_GROUPS_MAX,
    AllHeldSaid,
    ForgetSerials,
    HeartbeatMessage,
    HeldGroup,
    Leaving,
    PrefillPeersChanged,
    TurnedAway,
    Welcome,
)
from baton.wire.sealed_stream import UNREAD_BYTES_MAX, StreamConfig
from tests.support.joining import DEADLINE_S, KEY_TEXT, RouterSide, ask, router_side
from tests.support.server import ServerProcess, baton_serve

KEY = hashlib.blake2b(KEY_TEXT.encode(), digest_size=32, person=b"baton-cluster").digest()
JOIN = Join("d1", 7, "decode", b"model", "http://here", "", 4, 64, 16, 1024, 1000, 1, False)


# ── a membership alone, with an engine that only keeps what it is told ───────────────────────────────────────────────────


class QuietEngine:
    def __init__(self) -> None:
        self.orders: list[ToEngine] = []
        self.heard_us: int | None = None
        """When it last sent a message; None: it does all the time."""
        self.is_running = False
        """Whether its process uses a CPU while it is silent."""
        self.news = asyncio.Event()

    @property
    def silent_us(self) -> int:
        return 0 if self.heard_us is None else monotonic_us() - self.heard_us

    @property
    def runs(self) -> bool:
        return self.is_running

    @property
    def stall_limit_us(self) -> int:
        return 10_000_000

    def forward(self, message: ToEngine) -> None:
        self.orders.append(message)
        self.news.set()

    async def until(self, order: ToEngine) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while order not in self.orders:
                self.news.clear()
                await self.news.wait()


class Member:
    def __init__(self, port: int, welcome_us: int = WELCOME_US) -> None:
        self.engine = QuietEngine()
        self.drained = asyncio.Event()
        self.membership = RouterMembership(
            "d1",
            RouterAddress("127.0.0.1", port, KEY),
            InstanceSessions(JOIN, welcome_us=welcome_us),
            self.engine,
            self.drained.set,
        )
        self.running = asyncio.create_task(self.membership.run())

    async def go(self) -> None:
        self.running.cancel()
        await asyncio.wait((self.running,))
        await self.membership.close("the test is over")


@contextlib.asynccontextmanager
async def member(port: int, welcome_us: int = WELCOME_US) -> AsyncIterator[Member]:
    made = Member(port, welcome_us)
    try:
        yield made
    finally:
        await made.go()


@pytest.fixture
async def router() -> AsyncIterator[RouterSide]:
    async with router_side(KEY) as side:
        yield side


async def logged(caplog: pytest.LogCaptureFixture, text: str) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while text not in caplog.text:  # noqa: ASYNC110  a log tells nobody that it grew
            await asyncio.sleep(0.01)


async def test_it_joins_and_beats(router: RouterSide) -> None:
    async with member(router.port) as one:
        assert await router.next(Join) == JOIN
        await router.next(AllHeldSaid)
        await one.engine.until(ReportChanges())
        one.membership.record_pulse(Pulse(NO_GAUGES, True, True, bytes(KEY_BYTES), b"", ()))
        beat = await router.beat_where(lambda beat: beat.fresh)
        assert (beat.computing, beat.named) == (True, bytes(KEY_BYTES))
        for _ in range(3):  # though the engine says nothing more
            await router.beat_where(lambda beat: not beat.fresh and not beat.named)


async def test_what_the_router_orders_reaches_the_engine(router: RouterSide) -> None:
    async with member(router.port) as one:
        await router.until(lambda: bool(router.of(AllHeldSaid)))
        router.say(PrefillPeersChanged(("127.0.0.1:1",)))
        router.place(3, ask("r", 5))
        await one.engine.until(PrefillPeerAddresses(("127.0.0.1:1",)))
        await asyncio.wait_for(_submitted(one.engine), DEADLINE_S)
        one.membership.take(Accepted(FIRST_ROUTED_TICKET, (9,)))
        assert await router.next(Accepted) == Accepted(3, (9,))
        assert one.membership.open_requests == 1
        router.say(Cancel(9), Cancel(10))
        await one.engine.until(Cancel(9))
        assert Cancel(10) not in one.engine.orders  # it is not the router's
        router.say(Drain())
        await asyncio.wait_for(one.drained.wait(), DEADLINE_S)


async def _submitted(engine: QuietEngine) -> Submit:
    while True:
        for order in engine.orders:
            if isinstance(order, Submit):
                return order
        engine.news.clear()
        await engine.news.wait()


async def test_the_engines_silence_is_told_and_what_came_before_the_welcome_is_none(router: RouterSide) -> None:
    async with member(router.port) as one:
        one.engine.heard_us = monotonic_us() - 60_000_000
        first = await router.next(HeartbeatMessage)
        assert first.engine_silent_us < 10_000_000
        beat = await router.beat_where(lambda beat: beat.engine_silent_us > 200_000)
        one.engine.heard_us = monotonic_us()
        await router.beat_where(lambda later: later.engine_silent_us < beat.engine_silent_us)


async def test_the_engines_silence_goes_on_from_session_to_session(
    router: RouterSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(membership_module, "ENGINE_SILENT_US", 60_000_000)  # so that it calls again all the same
    async with member(router.port) as one:
        one.engine.heard_us = monotonic_us() - 60_000_000
        before = await router.beat_where(lambda beat: beat.engine_silent_us > 300_000)
        since = len(router.messages)
        router.hang_up()
        await router.next(Join, since)
        since = len(router.messages)
        first = await router.next(HeartbeatMessage, since)
        assert first.engine_silent_us > before.engine_silent_us


async def test_an_engine_that_is_silent_is_not_offered_to_a_router_until_it_speaks(
    router: RouterSide, caplog: pytest.LogCaptureFixture
) -> None:
    async with member(router.port) as one:
        one.engine.heard_us = monotonic_us()
        await router.beat_where(lambda beat: beat.engine_silent_us > membership_module.ENGINE_SILENT_US)
        router.hang_up()
        await logged(caplog, "the engine is silent")
        assert len(router.of(Join)) == 1
        one.engine.heard_us = None
        await router.until(lambda: len(router.of(Join)) >= 2)


async def test_a_router_that_does_not_answer_a_join_is_left_and_called_again(
    router: RouterSide, caplog: pytest.LogCaptureFixture
) -> None:
    router.answers = [None]
    async with member(router.port, welcome_us=50_000):
        await router.next(HeartbeatMessage)
    assert len(router.of(Join)) == 2
    assert "has not answered the join" in caplog.text


def test_all_that_may_be_held_can_be_written_in_one_go() -> None:
    assert HELD_BYTES_MAX + GROUP_BYTES_MAX <= UNREAD_BYTES_MAX  # with room for the steps that come after it
    assert ENDED_BYTES_MAX < HELD_BYTES_MAX
    assert CHOICES_MAX + ENDED_CHOICES_MAX <= HELD_GROUPS_MAX


async def test_while_this_process_was_held_up_the_engine_was_not_silent(
    router: RouterSide, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with member(router.port) as one:
        one.engine.heard_us = monotonic_us()
        await router.next(HeartbeatMessage)
        one.engine.heard_us = monotonic_us()
        monkeypatch.setattr(membership_module, "monotonic_us", lambda: monotonic_us() + 500_000)
        beat = await router.beat_where(lambda _: True)
        assert beat.engine_silent_us < 400_000
        assert one.membership.beat_late_us_max >= 400_000
    assert "held up" in caplog.text


async def test_a_router_that_comes_back_has_its_instances_again_though_it_was_away(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "baton.joining")
    async with router_side(KEY) as first:
        port = first.port
        one = Member(port)
        await first.next(HeartbeatMessage)
    await logged(caplog, "Connect call failed")
    async with router_side(KEY, port) as second:
        assert await second.next(Join) == JOIN
        await second.next(HeartbeatMessage)
        await one.go()
    told = [record.getMessage() for record in caplog.records]
    assert sum(line.startswith("joined") for line in told) == 2
    assert sum("calling again" in line for line in told) == 2  # that it was closed, and that nobody answers: each once


async def test_what_a_lost_router_asked_for_is_kept_for_its_grace_and_no_longer() -> None:
    async with router_side(KEY, welcome=Welcome("r", 50_000, orphan_grace_us=100_000)) as router:
        one = Member(router.port)
        await router.next(AllHeldSaid)
        router.place(1, ask("r", 5))
        await _submitted(one.engine)
        one.membership.take(Accepted(FIRST_ROUTED_TICKET, (9,)))
        await router.next(Accepted)
        assert Cancel(9) not in one.engine.orders
    await one.engine.until(Cancel(9))
    await one.go()


async def test_who_is_fenced_does_not_come_again(router: RouterSide) -> None:
    one = Member(router.port)
    await router.next(HeartbeatMessage)
    router.answers = [TurnedAway("incarnation 8 is known", fenced=True)]
    router.hang_up()
    with pytest.raises(InstanceFenced, match="incarnation 8 is known"):
        await asyncio.wait_for(one.running, DEADLINE_S)
    assert len(router.of(Join)) == 2


async def test_who_starts_with_a_clock_set_back_joins_above_its_former_life(
    router: RouterSide, caplog: pytest.LogCaptureFixture
) -> None:
    router.answers = [TurnedAway("incarnation 8000 is known", fenced=True, known_incarnation=8000)]
    async with member(router.port):
        await router.next(HeartbeatMessage)
    assert [join.incarnation for join in router.of(Join)][1:] == [8001]
    assert "8001" in caplog.text


async def test_a_router_that_is_silent_is_called_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though this side's own bytes arrive: it cannot know that by them."""
    monkeypatch.setattr(membership_module, "ROUTER_STREAM", StreamConfig(silent_us=150_000))
    async with router_side(KEY) as router, member(router.port):  # the router's sign of life comes after 500 ms
        beat = await router.beat_where(lambda beat: beat.router_silent_us >= 100_000)
        assert beat.router_silent_us < 10_000_000
        await router.until(lambda: len(router.of(Join)) >= 2)  # a beat may have been late in the first session


async def test_who_is_turned_away_says_so_once_and_comes_again(
    router: RouterSide, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    quick = replace(membership_module.RETRY, early_rejected_us=10_000, rejected_us=3600_000_000)
    monkeypatch.setattr(membership_module, "RETRY", quick)
    soon = quick.early_rejections
    router.answers = [TurnedAway("another model", fenced=False)] * soon
    async with member(router.port):
        await router.next(HeartbeatMessage)
    assert len(router.of(Join)) == soon + 1, "at first often: an earlier life of its own may be in the way"
    told = [record for record in caplog.records if "another model" in record.getMessage()]
    assert [record.levelno for record in told] == [logging.ERROR]


async def test_a_router_that_breaks_the_rules_is_left_and_called_again(router: RouterSide) -> None:
    async with member(router.port):
        await router.next(HeartbeatMessage)
        router.lines[-1].send([b"no message"])
        await router.until(lambda: len(router.of(Join)) >= 2)
        router.say(Welcome("r", 50_000, 1))  # a second one
        await router.until(lambda: len(router.of(Join)) >= 3)


async def test_a_router_with_another_key_is_not_believed(caplog: pytest.LogCaptureFixture) -> None:
    async with router_side(b"o" * 32) as other:
        async with member(other.port) as one:
            await logged(caplog, "cluster key")
            assert not one.engine.orders
        assert not other.messages


# ── whole instances ──────────────────────────────────────────────────────────────────────────────────────────────────────


@contextlib.contextmanager
def instance(port: int, *options: str, step_ms: float = 5.0) -> Iterator[ServerProcess]:
    # Not waited for here: this event loop has to answer it meanwhile.
    with baton_serve(
        "--executor", "scripted", "--step-ms", str(step_ms), "--router", f"127.0.0.1:{port}", "--cluster-key", KEY_TEXT,
        *options, wait=False,
    ) as server:  # fmt: skip
        yield server


async def exit_of(server: ServerProcess) -> int:
    return await asyncio.to_thread(server.process.wait, DEADLINE_S)


def row_ends(router: RouterSide, serial: int) -> bool:
    return router.end_of(serial) is not None


async def test_the_life_of_an_instance_under_a_router(router: RouterSide) -> None:
    with instance(router.port, "--name", "m1", "--kv-blocks", "256") as server:
        join = await router.next(Join)
        assert (join.name, join.role, join.pid, join.draining) == ("m1", "mixed", server.process.pid, False)
        assert (join.blocks, join.block_size, join.slots, join.peer_address) == (256, 16, 64, "")
        assert join.fingerprint
        await _serves_legs_and_its_own_clients(router, join)
        await _keeps_what_is_open_when_the_session_is_lost(router)
        await _tells_that_its_engine_is_silent(router, server)
        await _finishes_what_is_open_when_told_to_stop(router, server)


async def _serves_legs_and_its_own_clients(router: RouterSide, join: Join) -> None:
    router.place(1, ask("whole", 30))
    own = asyncio.create_task(_complete(join.url))
    whole = await router.serial_of(1)
    await router.until(lambda: row_ends(router, whole))
    tokens = router.tokens_of(whole)
    assert len(tokens) == 30
    assert (await own)["usage"]["completion_tokens"] == 20
    router.place(2, ask("rest", 30, generated=frozen_tokens(tokens[:12])))
    rest = await router.serial_of(2)
    await router.until(lambda: row_ends(router, rest))
    assert router.tokens_of(rest) == tokens[12:]
    await router.beat_where(lambda beat: beat.gauges.steps >= 30 and beat.gauges.running == 0)
    assert any(beat.named for beat in router.of(HeartbeatMessage))
    router.say(ForgetSerials((whole, rest)))


async def _complete(url: str) -> dict[str, dict[str, int]]:
    async with httpx.AsyncClient(timeout=DEADLINE_S) as client:
        body = {"model": "scripted", "prompt": "hello", "max_tokens": 20, "ignore_eos": True}
        answer = await client.post(f"{url}/v1/completions", json=body)
        made: dict[str, dict[str, int]] = answer.json()
        return made


async def _keeps_what_is_open_when_the_session_is_lost(router: RouterSide) -> None:
    router.place(3, ask("held", 150), origin=b"who asked")
    serial = await router.serial_of(3)
    await router.until(lambda: len(router.tokens_of(serial)) > 3)
    since = len(router.messages)
    router.hang_up()
    held = await router.next(HeldGroup, since)
    (line,) = held.lines
    assert (held.origin, line.serial, held.group[0].request_id) == (b"who asked", serial, "held")
    before = list(memoryview(line.tokens).cast("i"))
    assert before[: len(router.tokens_of(serial))][:3] == router.tokens_of(serial)[:3]
    await router.until(lambda: row_ends(router, serial))
    joined_at = router.messages.index(held)
    assert len(before) + len(router.tokens_of(serial, joined_at)) == 150
    router.say(ForgetSerials((serial,)))


async def _tells_that_its_engine_is_silent(router: RouterSide, server: ServerProcess) -> None:
    engine = server.engine_pid()
    os.kill(engine, signal.SIGSTOP)
    try:
        await router.beat_where(lambda beat: beat.engine_silent_us > 600_000)
    finally:
        os.kill(engine, signal.SIGCONT)
    await router.beat_where(lambda beat: beat.engine_silent_us < 600_000)


async def _finishes_what_is_open_when_told_to_stop(router: RouterSide, server: ServerProcess) -> None:
    router.place(4, ask("last", 60))
    serial = await router.serial_of(4)
    server.process.send_signal(signal.SIGTERM)
    await router.next(Leaving)
    assert await exit_of(server) == 0
    await router.until(lambda: len(router.ends) == 2)
    end = router.end_of(serial)
    assert end is not None
    assert (end.reason, len(router.tokens_of(serial))) == (FinishReason.LENGTH, 60)


async def test_one_that_prefills_joins_with_its_address_and_once_fenced_it_ends_and_says_why(router: RouterSide) -> None:
    with instance(router.port, "--role", "prefill", "--peer-port", "0", "--name", "p1") as server:
        join = await router.next(Join)
        assert (join.role, join.name) == ("prefill", "p1")
        host, _, port = join.peer_address.rpartition(":")
        assert (host, int(port) > 0) == ("127.0.0.1", True)
        await router.next(HeartbeatMessage)
        router.answers = [TurnedAway("a later life of p1 is known", fenced=True)]
        router.hang_up()
        assert await exit_of(server) == 1
        assert "a later life of p1 is known" in server.output()


async def test_one_that_is_fenced_while_it_drains_ends_at_once(router: RouterSide) -> None:
    with instance(router.port, "--drain-timeout", "600", "--name", "m1", step_ms=1000) as server:
        await router.next(Join)
        router.place(1, ask("computed for nobody", 500))
        await router.serial_of(1)
        server.process.send_signal(signal.SIGTERM)
        await router.next(Leaving)
        router.answers = [TurnedAway("a later life of m1 is known", fenced=True)]
        router.hang_up()
        assert await exit_of(server) == 1
        assert "a later life of m1 is known" in server.output()


async def test_when_the_engine_dies_the_router_hears_at_once(router: RouterSide) -> None:
    with instance(router.port, "--role", "decode") as server:
        join = await router.next(Join)
        assert (join.role, join.name) == (
            "decode",
            default_name(socket.gethostname(), "decode", int(join.url.rpartition(":")[2])),
        )
        router.place(1, ask("lost", 1000))
        await router.serial_of(1)
        os.kill(server.engine_pid(), signal.SIGKILL)
        await router.until(lambda: bool(router.ends))
        assert server.process.poll() is None  # it still says why to whoever looks, while the router goes on elsewhere
        assert await exit_of(server) == 1
        assert "the engine died" in server.output()


def test_instances_of_two_machines_have_two_names() -> None:
    assert default_name("gpu-7.rack.example.org", "decode", 8000) == "gpu-7-decode-8000"
    assert default_name("", "mixed", 1) == "host-mixed-1"
    assert len(default_name("x" * 253, "prefill", 65535)) < 64
