"""What the dashboard of a lone instance learns of its requests, and that their clients lose nothing by it."""

from __future__ import annotations

import pytest

from baton.api.engine import Sink, StreamEnd, TokenBurst
from baton.api.original_request import OriginalRequest
from baton.core.engine.ended import Bill
from baton.core.engine.request import FinishReason
from baton.core.errors import Refusal, RefusalCode, Refused
from baton.core.routing.events import Instance, Join
from baton.node.dashboard_state import DashboardState
from baton.node.watched_engine import WatchedEngine
from tests.api.engine import ScriptedEngine
from tests.support.routing import submission

FACTS = Join(Instance("alone"), 1, "mixed", b"model", "http://x", "", 4, 64, 16, 1024, 320)
ORIGIN = OriginalRequest("/v1/completions", b"{}", "", "r-1", 7, 1)


class Stream:
    def __init__(self) -> None:
        self.sink: Sink | None = None
        self.stopped: list[int | None] = []

    def pour(self, sink: Sink) -> None:
        self.sink = sink

    def stop(self, keep: int) -> None:
        self.stopped.append(keep)

    def abort(self) -> None:
        self.stopped.append(None)


class OneStream(ScriptedEngine):
    def __init__(self) -> None:
        super().__init__(lambda _: [], vocabulary=320)
        self.stream = Stream()
        self.refusal: Refusal | None = None

    async def submit(self, group: object, origin: object = None) -> list[Stream]:  # type: ignore[override]
        if self.refusal is not None:
            raise Refused(self.refusal)
        return [self.stream]


@pytest.fixture
def made() -> tuple[WatchedEngine, OneStream, DashboardState, list[int]]:
    now, inner = [1_000], OneStream()
    state = DashboardState(0)
    return WatchedEngine(inner, state, FACTS, lambda: now[0]), inner, state, now


Made = tuple[WatchedEngine, OneStream, DashboardState, list[int]]


def lane_of(state: DashboardState) -> dict[str, object]:
    (request,) = state.snapshot(10_000)["requests"]  # type: ignore[misc]
    (lane,) = request["lanes"]
    return dict(lane)


async def test_a_request_is_shown_from_its_arrival_to_its_end_with_its_prefill(made: Made) -> None:
    engine, inner, state, now = made
    (stream,) = await engine.submit([submission("x")], ORIGIN)
    got: list[TokenBurst | Exception] = []
    stream.pour(got.append)
    assert inner.stream.sink is not None
    now[0] = 4_000
    bursts = [TokenBurst((1,), (), None), TokenBurst((2, 3), (), None)]
    bursts.append(TokenBurst((), (), StreamEnd(FinishReason.LENGTH, 0, Bill(queue_us=500, prefill_us=2_000))))
    inner.stream.sink(bursts[0])
    assert (lane_of(state)["tokens"], lane_of(state)["first_us"]) == (1, 4_000)
    inner.stream.sink(bursts[1])
    assert lane_of(state)["tokens"] == 1, "counted, and told at the next sample"
    engine.sample()
    assert lane_of(state)["tokens"] == 3
    now[0] = 6_000
    inner.stream.sink(bursts[2])
    assert got == bursts
    lane = lane_of(state)
    assert (lane["finish"], lane["ended_us"]) == ("length", 6_000)
    stages = [(stage, start_us, tokens) for stage, _, start_us, _, tokens, _ in lane["segments"]]  # type: ignore[attr-defined]
    assert stages == [("queued", 1_000, 0), ("placed", 1_000, 0), ("prefill", 1_500, 0), ("decode", 4_000, 0)]
    assert engine.view().open == 0


async def test_stop_and_abort_reach_the_engine(made: Made) -> None:
    engine, inner, _, _ = made
    (stream,) = await engine.submit([submission("x")], ORIGIN)
    stream.stop(3)
    stream.abort()
    assert inner.stream.stopped == [3, None]
    assert engine.view().open == 1, "its end is yet to come"


async def test_a_refused_request_is_shown_as_declined(made: Made) -> None:
    engine, inner, state, _ = made
    inner.refusal = Refusal(RefusalCode.QUEUE_FULL, "full")
    with pytest.raises(Refused):
        await engine.submit([submission("x")], ORIGIN)
    assert lane_of(state)["finish"] == "declined: queue_full"


async def test_the_death_of_the_engine_ends_a_request_on_the_dashboard(made: Made) -> None:
    engine, inner, state, _ = made
    (stream,) = await engine.submit([submission("x")], ORIGIN)
    stream.pour(lambda _: None)
    assert inner.stream.sink is not None
    inner.stream.sink(RuntimeError("it died"))
    assert lane_of(state)["finish"] == "it died"
    assert engine.view().open == 0
