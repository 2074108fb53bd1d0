"""A router that was told how many instances to expect: until they have come, requests wait for them, within bounds."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from baton.core.errors import RefusalCode
from baton.core.routing.config import RouterConfig
from baton.core.routing.events import Instance, InstanceDrains, InstanceLost, RequestDeclined
from baton.core.routing.identity import RequestNumber
from tests.support.routing import Bench, facts, submission

EXPECTING = RouterConfig(absent_us=1_000_000, expected_instances=2, start_us=60_000_000)


def declined(bench: Bench) -> list[RequestNumber]:
    assert {item.refusal.code for item in bench.ever(RequestDeclined)} <= {RefusalCode.NO_INSTANCE}
    return [item.request for item in bench.ever(RequestDeclined)]


def test_a_request_waits_for_the_first_of_the_expected_instances() -> None:
    bench = Bench(EXPECTING)
    body = bench.arrive(submission("x"))
    bench.pass_us(45_000_000)
    assert not declined(bench)
    bench.join(facts("a"))
    assert bench.sent().attempt.request == body


def test_without_an_expectation_it_does_not() -> None:
    bench = Bench(RouterConfig(absent_us=1_000_000))
    body = bench.arrive(submission("x"))
    bench.pass_us(1_000_000)
    assert declined(bench) == [body]


def test_an_instance_that_only_prefills_is_not_waited_for() -> None:
    bench = Bench(EXPECTING)
    bench.arrive(submission("x"))
    bench.join(facts("p1", "prefill"))
    bench.join(facts("p2", "prefill"))
    assert bench.router.expected.missing == 2
    bench.pass_us(45_000_000)
    assert not declined(bench)


def test_who_waits_is_declined_when_the_time_to_start_is_over() -> None:
    bench = Bench(EXPECTING)
    first = bench.arrive(submission("x"))
    bench.pass_us(59_999_999)
    assert not declined(bench)
    bench.pass_us(1)
    (end,) = bench.ever(RequestDeclined)
    assert end.refusal.message == "no instance has served for 1000 ms, and 2 of 2 expected instances never have"
    second = bench.arrive(submission("y"))
    bench.pass_us(999_999)
    assert declined(bench) == [first]
    bench.pass_us(1)
    assert declined(bench) == [first, second], "after the start it waits as long as without an expectation"


def test_when_all_have_come_once_an_absence_ends_requests_as_ever() -> None:
    bench = Bench(EXPECTING)
    for name in ("a", "b"):
        bench.join(facts(name))
        bench.tell(InstanceLost(bench.sessions[name], "reset"))
    assert bench.router.expected.missing == 0
    body = bench.arrive(submission("x"))
    bench.pass_us(1_000_000)
    assert declined(bench) == [body]


def test_an_instance_that_comes_a_second_time_is_not_another() -> None:
    bench = Bench(EXPECTING)
    for incarnation in (1, 2):
        bench.join(facts("a", incarnation=incarnation))
        bench.tell(InstanceLost(bench.sessions["a"], "reset"))
    bench.arrive(submission("x"))
    bench.pass_us(20_000_000)
    assert not declined(bench)


def test_an_instance_that_drains_from_its_start_has_not_served() -> None:
    bench = Bench(EXPECTING)
    bench.join(facts("a"), draining=True)
    assert bench.router.expected.missing == 2


def test_the_request_timeout_ends_a_wait_for_instances_too() -> None:
    bench = Bench(RouterConfig(deadline_us=5_000_000, expected_instances=1))
    body = bench.arrive(submission("x"))
    bench.pass_us(4_999_999)
    assert not declined(bench)
    bench.pass_us(1)
    assert declined(bench) == [body]


STEPS = st.lists(
    st.tuples(st.sampled_from(["arrive", "join", "lose", "drain", "pass"]), st.integers(0, 3), st.integers(1, 900)),
    max_size=25,
)


@settings(max_examples=80, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(STEPS, st.integers(0, 3), st.sampled_from([0, 700_000, 3_000_000]))
def test_a_request_is_declined_for_want_of_instances_exactly_when_its_wait_is_over(
    steps: list[tuple[str, int, int]], expected: int, start_us: int
) -> None:
    """Against a model of its own: nobody serves, it has waited for its time, and nobody is expected any more."""
    config = RouterConfig(absent_us=500_000, expected_instances=expected, start_us=start_us)
    bench = Bench(config)
    bench.pass_us(0)
    model = _Model(config)
    for what, which, time_ms in steps:
        name = f"i{which}"
        if what == "arrive":
            model.waits[bench.arrive(submission(f"x{bench.now_us}"))] = bench.now_us
        elif what == "join" and name not in model.here:
            bench.join(facts(name, incarnation=bench.now_us))
            model.here[name] = True
        elif what == "lose" and name in model.here:
            bench.tell(InstanceLost(bench.sessions[name], "reset"))
            del model.here[name]
        elif what == "drain" and model.here.get(name):
            bench.tell(InstanceDrains(Instance(name)))
            model.here[name] = False
        model.look(bench, 0)
        model.look(bench, time_ms * 1000)


class _Model:
    """Requests that were never sent anywhere, and who serves; judged in small steps of time."""

    STEP_US = 50_000

    def __init__(self, config: RouterConfig) -> None:
        self.config = config
        self.here: dict[str, bool] = {}
        """By name: whether it takes requests."""
        self.served: set[str] = set()
        self.waits: dict[RequestNumber, int] = {}
        """When each that still waits for its first place arrived."""
        self.began_us: int | None = None
        self.absent_from_us = 0

    def look(self, bench: Bench, time_us: int) -> None:
        until_us = bench.now_us + time_us
        while True:
            self._judge(bench)
            if bench.now_us >= until_us:
                return
            bench.run_to(min(until_us, bench.now_us + self.STEP_US))

    def _judge(self, bench: Bench) -> None:
        now_us = bench.now_us
        if self.began_us is None and bench.all:
            self.began_us = now_us
        serving = [name for name, takes in self.here.items() if takes]
        self.served.update(serving)
        if serving:
            self.absent_from_us = now_us
            self.waits.clear()  # they are sent to it; what becomes of them then is not judged here
            return
        gone = set(declined(bench))
        awaited = (
            len(self.served) < self.config.expected_instances and now_us < (self.began_us or now_us) + self.config.start_us
        )
        for body, arrived_us in list(self.waits.items()):
            is_over = now_us >= max(arrived_us, self.absent_from_us) + self.config.absent_us and not awaited
            assert (body in gone) == is_over, (body, now_us, arrived_us, self.absent_from_us, awaited)
            if is_over:
                del self.waits[body]
