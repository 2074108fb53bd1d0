"""Going on after what was generated elsewhere: the tokens are those of one undisturbed run, and the bill is right.

The scripted executor is the witness: a wrong token, position or block changes everything that follows.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from baton.core.config import HandoverConfig, OnPreempt, PrefillPath, ReservePolicy, WorkerConfig
from baton.core.engine.ended import StartedRequest
from baton.core.engine.request import FinishReason, Sampling, Serial, Submission, frozen_tokens
from baton.core.engine.worker import Deliver, StepDone, Tick
from baton.core.errors import RefusalCode
from baton.core.handover.messages import Tell
from baton.executor.scripted import undisturbed
from tests.support.driver import VOCABULARY, Driver, submission
from tests.support.workers import Cluster, decode_config, prefill_config

PROMPT = [7, 3, 9, 1, 4, 4, 8, 2, 6, 5, 11]
SEEDED = Sampling(seed=5, choice=1, stop_token_ids=(0,), min_tokens=6)


def config(**changes: object) -> WorkerConfig:
    settings: dict[str, object] = {"slots": 4, "blocks": 48, "block_size": 4, "context_tokens": 96, "step_tokens": 16}
    return WorkerConfig(**(settings | changes))  # type: ignore[arg-type]


def whole(sampling: Sampling, max_tokens: int = 20, prompt: Sequence[int] = PROMPT) -> list[int]:
    return undisturbed(prompt, sampling, max_tokens, VOCABULARY)


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("cut", range(20))
def test_an_answer_cut_anywhere_goes_on_with_the_same_tokens(cut: int, cached: bool) -> None:
    driver = Driver(config(prefix_cache=cached))
    for sampling in (Sampling(seed=0, temperature=0.0), SEEDED):
        tokens = whole(sampling)
        if cut >= len(tokens):
            continue
        (serial,) = driver.submit(submission(PROMPT, 20, sampling=sampling, generated=tokens[:cut]))
        driver.run()
        assert driver.outputs[serial] == tokens[cut:]
        end = driver.ended[serial]
        assert (end.generated_tokens, end.bill.recomputed_tokens) == (len(tokens), 0)
        assert end.reason is (FinishReason.LENGTH if len(tokens) == 20 else FinishReason.STOP)


def test_what_was_generated_elsewhere_is_billed_once_as_computed_or_as_found() -> None:
    driver, tokens = Driver(config()), whole(SEEDED)
    serials = []
    for cut in (12, 12):
        serials += driver.submit(submission(PROMPT, 20, sampling=SEEDED, generated=tokens[:cut]))
        driver.run()
    cold, warm = (driver.ended[serial].bill for serial in serials)
    assert (cold.cached_tokens, cold.computed_tokens) == (0, len(PROMPT) + len(tokens) - 1)
    assert warm.cached_tokens > len(PROMPT)
    assert warm.computed_tokens == cold.computed_tokens - warm.cached_tokens
    assert warm.recomputed_tokens == cold.recomputed_tokens == 0


def test_the_first_token_of_each_leg_says_what_was_cached() -> None:
    driver, tokens = Driver(config()), whole(SEEDED)
    driver.submit(submission(PROMPT, 20, sampling=SEEDED, generated=tokens[:9]))
    started: list[StartedRequest] = []
    while not driver.worker.is_idle:
        driver.tick()
        (deliver,) = driver.send(StepDone(driver.executor.collect()))
        started += deliver.settled.started if isinstance(deliver, Deliver) else ()
    assert started == [StartedRequest(Serial(0), 0)]


def test_a_stop_found_in_a_continuation_counts_all_outputs() -> None:
    driver, tokens = Driver(config(depth=1)), whole(SEEDED)
    (serial,) = driver.submit(submission(PROMPT, 20, sampling=SEEDED, generated=tokens[:5]))
    for _ in range(6):
        driver.tick()
        driver.settle_one()
    assert len(driver.outputs[serial]) > 2
    driver.stop_found(serial, keep=7)
    driver.run()
    assert (driver.ended[serial].reason, driver.ended[serial].generated_tokens) == (FinishReason.STOP, 7)


def test_one_that_waits_and_is_cancelled_says_what_it_brought_along() -> None:
    driver = Driver(config())
    (serial,) = driver.submit(submission(PROMPT, 20, generated=[1, 2, 3]))
    driver.cancel(serial)
    assert driver.ended[serial].generated_tokens == 3


@pytest.mark.parametrize(
    ("generated", "sampling", "max_tokens", "code"),
    [
        ([1] * 8, SEEDED, 8, RefusalCode.NOTHING_LEFT),
        ([1] * 9, SEEDED, 8, RefusalCode.NOTHING_LEFT),
        ([1] * 7 + [0], SEEDED, 20, RefusalCode.NOTHING_LEFT),
        ([1] * 5 + [0], SEEDED, 20, None),
        ([1] * 5 + [0], SEEDED, None, None),
        ([1] * 85, SEEDED, None, RefusalCode.CONTEXT_EXCEEDED),
        ([1] * 84, SEEDED, None, None),
    ],
    ids=["all", "more", "stopped", "stop within min_tokens", "no max_tokens", "context full", "one token left"],
)
def test_what_has_nothing_left_to_generate_is_refused(
    generated: list[int], sampling: Sampling, max_tokens: int | None, code: RefusalCode | None
) -> None:
    driver = Driver(config())
    driver.submit(submission(PROMPT, max_tokens, sampling=sampling, generated=generated))
    assert [refusal.code for refusal in driver.refusals] == ([] if code is None else [code])
    driver.run()


@pytest.mark.parametrize("cuts", [(0, 0), (5, 0), (0, 5), (9, 3), (3, 14), (19, 19)])
def test_choices_that_got_differently_far_share_the_prompt_and_nothing_else(cuts: tuple[int, int]) -> None:
    """A leader that brings outputs along has names for blocks that its followers do not have."""
    driver, prompt = Driver(config()), list(range(1, 12))
    samplings = [Sampling(seed=3, choice=choice) for choice in range(2)]
    answers = [whole(sampling, 20, prompt) for sampling in samplings]
    group = [
        submission(
            prompt, 20, name=str(n), sampling=samplings[n], leader="0" if n else None, generated=answers[n][: cuts[n]]
        )
        for n in range(2)
    ]
    for _ in range(2):  # the second time from the cache, where a wrong name would lead to another's block
        serials = driver.submit(*group)
        driver.run()
        for serial, answer, cut in zip(serials, answers, cuts, strict=True):
            assert driver.outputs[serial] == answer[cut:]
    _, follower, *_ = [start for launch in driver.plans for start in launch.plan.starts]
    assert follower.computed >= 8, "the follower did not find the leader's prompt"


def test_a_follower_names_its_blocks_after_its_own_outputs() -> None:
    """Whoever has the leader's outputs and then the follower's must not find the follower's block behind the leader's."""
    driver, prompt = Driver(config()), list(range(1, 12))
    samplings = [Sampling(seed=3, choice=choice) for choice in range(2)]
    ahead, behind = (whole(sampling, 20, prompt) for sampling in samplings)
    driver.submit(
        submission(prompt, 20, name="0", sampling=samplings[0], generated=ahead[:9]),
        submission(prompt, 20, name="1", sampling=samplings[1], leader="0"),
    )
    driver.run()
    mixed = [*prompt, ahead[0], *behind[1:6]]
    (serial,) = driver.submit(submission(mixed, 6))
    driver.run()
    assert driver.outputs[serial] == whole(Sampling(seed=0, temperature=0.0), 6, mixed)
    assert driver.ended[serial].cached_tokens == 12, "prompt and the leader's first output, as one more block"


@st.composite
def _configs(draw: st.DrawFn) -> WorkerConfig:
    return config(
        blocks=draw(st.integers(11, 24)),
        slots=draw(st.integers(1, 4)),
        step_tokens=draw(st.integers(8, 24)),
        burst=draw(st.integers(1, 2)),
        depth=draw(st.integers(1, 3)),
        prefix_cache=draw(st.booleans()),
        reserve=draw(st.sampled_from(ReservePolicy)),
        context_tokens=44,
    )


BODIES = st.lists(st.tuples(st.integers(1, 14), st.integers(1, 3), st.integers(1, 24)), min_size=1, max_size=4)
"""(tokens in the prompt, choices, max_tokens) of each."""
LEGS = st.lists(st.tuples(_configs(), st.lists(st.booleans(), min_size=4, max_size=40)), max_size=5)
"""An instance, and how far it comes: a pass, or the settling of a step."""


@settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(bodies=BODIES, legs=LEGS, last=_configs())
def test_any_bodies_carried_over_any_number_of_instances_yield_one_undisturbed_answer(
    bodies: list[tuple[int, int, int]], legs: list[tuple[WorkerConfig, list[bool]]], last: WorkerConfig
) -> None:
    """Each instance is left at some moment with whatever it has delivered; pools are so small that choices also yield."""
    asked = {
        f"{number}/{choice}": submission(
            range(prompt), max_tokens, name=f"{number}/{choice}",
            sampling=Sampling(seed=number, choice=choice, stop_token_ids=(0, 9), min_tokens=number),
        )
        for number, (prompt, choices, max_tokens) in enumerate(bodies) for choice in range(choices)
    }  # fmt: skip
    answers: dict[str, list[int]] = {name: [] for name in asked}
    left = dict(asked)
    for made, steps in [(Driver(each), steps) for each, steps in legs] + [(Driver(last), None)]:
        serials = _submit_bodies(made, left)
        for step in steps or ():
            made.tick() if step else made.settle_one()
        if steps is None:
            made.run()
        for serial, name in serials.items():
            answers[name] += made.outputs[serial]
            left[name] = replace(left[name], generated=frozen_tokens(answers[name]))
            if serial in made.ended:
                assert made.ended[serial].generated_tokens == len(answers[name])
                del left[name]
    assert not left
    for name, item in asked.items():
        assert answers[name] == whole(item.sampling, item.max_tokens or 0, item.prompt.tolist())


def _submit_bodies(made: Driver, open_choices: dict[str, Submission]) -> dict[Serial, str]:
    """Each body's choices together, the first that is left leading the others."""
    groups: dict[str, list[Submission]] = {}
    for name, item in open_choices.items():
        group = groups.setdefault(name.split("/")[0], [])
        group.append(replace(item, leader=group[0].request_id if group else None))
    return {
        serial: str(item.request_id)
        for group in groups.values()
        for serial, item in zip(made.submit(*group), group, strict=True)
    }


# ── prefilled by a peer ──────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("path", PrefillPath)
@pytest.mark.parametrize("cut", [1, 3, 4, 8, 9, 19])
def test_a_peer_prefills_what_was_generated_too(cut: int, path: PrefillPath) -> None:
    cluster = Cluster(cut, [prefill_config(prefill_path=path)], [decode_config(handover=HandoverConfig(local_tokens=0))])
    (d,), (p,) = cluster.ds, cluster.ps
    prompt = list(range(30))
    sampling = Sampling(seed=2)
    tokens = whole(sampling, 20, prompt)
    (serial,) = d.submit(submission(prompt, 20, sampling=sampling, generated=tokens[:cut]))
    cluster.run()
    assert d.outputs[serial] == tokens[cut:]
    assert d.ended[serial].generated_tokens == 20
    assert d.ended[serial].bill.recomputed_tokens == 0
    assert d.ended[serial].bill.computed_tokens == 30 + 19
    assert p.worker.gauges().handovers.made == 1
    assert not any(launch.plan.chunks for launch in d.plans), "D computed part of it"
    cluster.nothing_is_held()


def test_a_continuation_finds_at_the_taker_what_it_generated_there_before() -> None:
    """Its instance was lost to the router, not to itself: the blocks are still there, and only the rest is computed."""
    cluster = Cluster(3, [prefill_config()], [decode_config()])
    (d,) = cluster.ds
    prompt = list(range(30))
    (first,) = d.submit(submission(prompt, 16, name="first"))
    cluster.run()
    (again,) = d.submit(submission(prompt, 24, name="again", generated=d.outputs[first]))
    cluster.run()
    assert d.outputs[again] == whole(Sampling(seed=0, temperature=0.0), 24, prompt)[16:]
    assert d.ended[again].bill.attempts == 0, "so little was left that no peer was worth asking"


def test_the_peer_that_is_named_is_asked_and_another_where_it_is_not_there_or_does_not_take_it() -> None:
    cluster = Cluster(1, [prefill_config() for _ in range(3)], [decode_config()])
    (d,) = cluster.ds

    def asked(prefill_at: str) -> str:
        (serial,) = d.submit(submission(range(40), 4, prefill_at=prefill_at))
        (peer,) = [act.peer for act in d.send(Tick()) if isinstance(act, Tell)]
        d.cancel(serial)
        return peer

    assert [asked("p2") for _ in range(3)] == ["p2"] * 3
    assert asked("nobody") != "p2", "the one with least to do"
    cluster.ps[2].worker.prefill_side.draining = True  # type: ignore[union-attr]
    (serial,) = d.submit(submission(range(40), 4, prefill_at="p2"))
    cluster.run()
    assert d.ended[serial].bill.attempts == 2
    assert sum(p.worker.gauges().handovers.made for p in cluster.ps[:2]) == 1


@pytest.mark.parametrize("on_preempt", OnPreempt)
@pytest.mark.parametrize("peers", [1, 2])
def test_an_ask_whose_peer_is_lost_goes_to_another_or_is_done_here(peers: int, on_preempt: OnPreempt) -> None:
    handover = HandoverConfig(local_tokens=0)
    cluster = Cluster(1, [prefill_config() for _ in range(peers)], [decode_config(on_preempt=on_preempt, handover=handover)])
    (d,) = cluster.ds
    (serial,) = d.submit(submission(range(40), 4))
    (first,) = [act.peer for act in d.send(Tick()) if isinstance(act, Tell)]
    cluster.lose(cluster.nodes[first], d)
    assert d.worker.gauges().handovers.timed_out == 1
    cluster.run()
    assert d.outputs[serial] == whole(Sampling(seed=0, temperature=0.0), 4, range(40))
    assert d.ended[serial].reason is FinishReason.LENGTH
    assert d.worker.gauges().handovers.made == peers - 1
    cluster.nothing_is_held()
