"""The ordering book: whatever comes first, signals, orders or openings, each piece leaves once, and never too early."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from baton.core.handover.messages import Handover, PeerId
from baton.kv.send_queue import SIGNALLED_STEPS_MAX, BlockRun, LayerSignals, SendQueue

LAYERS = 5
HANDOVER = Handover(PeerId("d"), 1, 1)


def _book(tasks_max: int = 8) -> tuple[SendQueue, LayerSignals]:
    signals = LayerSignals(LAYERS)
    return SendQueue(LAYERS, signals, tasks_max), signals


def _all_runs(book: SendQueue, handover: Handover = HANDOVER) -> list[BlockRun]:
    runs = []
    while (run := book.next_run(handover)) is not None:
        runs.append(run)
    return runs


def test_a_signal_of_layer_0_before_the_task_is_known_is_kept() -> None:
    book, signals = _book()
    signals.layer_done(3, 0)
    assert book.ship(HANDOVER, 3, 0, 2, True) is None
    assert _all_runs(book) == []
    assert book.open(HANDOVER, 0, 2) is None
    assert _all_runs(book) == [BlockRun(range(1), 0, 2)]


def test_neighbouring_layers_go_as_one_run() -> None:
    book, signals = _book()
    book.open(HANDOVER, 4, 5)
    book.ship(HANDOVER, 7, 4, 9, True)
    for layer in (0, 1, 3):
        signals.layer_done(7, layer)
    assert _all_runs(book) == [BlockRun(range(2), 4, 9), BlockRun(range(3, 4), 4, 9)]
    signals.layer_done(7, 2)
    assert _all_runs(book) == [BlockRun(range(2, 3), 4, 9)]
    assert not book.finished(HANDOVER)
    signals.step_done(7)
    assert _all_runs(book) == [BlockRun(range(4, 5), 4, 9)]
    assert book.finished(HANDOVER)


def test_what_is_complete_goes_at_once_with_all_its_layers() -> None:
    book, _ = _book()
    book.open(HANDOVER, 0, 3)
    book.ship(HANDOVER, None, 0, 3, True)
    assert _all_runs(book) == [BlockRun(range(LAYERS), 0, 3)]


def test_runs_may_be_kept_short() -> None:
    signals = LayerSignals(LAYERS)
    book = SendQueue(LAYERS, signals, 8, run_layers_max=2)
    book.open(HANDOVER, 0, 3)
    book.ship(HANDOVER, None, 0, 3, True)
    assert [run.layers for run in _all_runs(book)] == [range(2), range(2, 4), range(4, 5)]
    assert book.finished(HANDOVER)


def test_signals_of_steps_that_never_end_are_bounded_and_nothing_is_lost() -> None:
    book, signals = _book()
    book.open(HANDOVER, 0, 1)
    book.ship(HANDOVER, 0, 0, 1, True)
    for step in range(SIGNALLED_STEPS_MAX + 1):
        signals.layer_done(step, 0)
    assert _all_runs(book) == []
    signals.step_done(0)
    assert _all_runs(book) == [BlockRun(range(LAYERS), 0, 1)]


def test_a_late_signal_of_a_step_that_is_over_means_nothing() -> None:
    _, signals = _book()
    signals.step_done(5)
    signals.layer_done(4, 1)
    assert signals.written(4) == signals.written(None) == (1 << LAYERS) - 1
    assert signals.written(6) == 0


def test_more_hand_overs_than_agreed_are_refused() -> None:
    book, _ = _book(tasks_max=1)
    assert book.open(HANDOVER, 0, 1) is None
    other = HANDOVER._replace(attempt=2)
    assert "more than 1" in (book.open(other, 0, 1) or "")
    assert "more than 1" in (book.ship(other, None, 0, 1, True) or "")
    book.forget(HANDOVER)
    assert book.open(other, 0, 1) is None


@pytest.mark.parametrize(
    ("orders", "refusal"),
    [
        ([(0, 2, False), (1, 3, True)], "twice"),
        ([(0, 4, False)], "more than"),
        ([(0, 2, True)], "less than"),
        ([(0, 3, True), (3, 3, False)], "after the last"),
        ([(2, 1, False)], "[2, 1)"),
    ],
)
def test_orders_that_do_not_add_up_are_refused(orders: list[tuple[int, int, bool]], refusal: str) -> None:
    book, _ = _book()
    assert book.open(HANDOVER, 0, 3) is None
    answers = [book.ship(HANDOVER, None, *order) for order in orders]
    assert answers[:-1] == [None] * (len(orders) - 1)
    assert refusal in (answers[-1] or "")
    other, _ = _book()
    late = [other.ship(HANDOVER, None, *order) for order in orders]
    assert late[-1] is not None or refusal in (other.open(HANDOVER, 0, 3) or "")


class AnyOrder(RuleBasedStateMachine):
    """Chunks of a sequence, a step each, against a model that keeps sets."""

    def __init__(self) -> None:
        super().__init__()
        self.begin(0, [1], False)

    @initialize(first=st.integers(0, 40), sizes=st.lists(st.integers(1, 5), min_size=1, max_size=5), opened=st.booleans())
    def begin(self, first: int, sizes: list[int], opened: bool) -> None:
        self.book, self.signals = _book()
        self.chunks: list[tuple[int, int, int]] = []
        at = first
        for step, size in enumerate(sizes):
            self.chunks.append((step, at, at + size))
            at += size
        self.first, self.upto = first, at
        self.ordered: list[int] = []
        self.written: set[tuple[int, int]] = set()
        self.sent: set[tuple[int, int]] = set()
        self.opened = False
        if opened:
            self.open()

    @rule()
    def open(self) -> None:
        if not self.opened:
            assert self.book.open(HANDOVER, self.first, self.upto - self.first) is None
            self.opened = True

    @rule(pick=st.randoms(use_true_random=False))
    def order(self, pick: object) -> None:
        left = [step for step, _, _ in self.chunks if step not in self.ordered]
        if left:
            step = pick.choice(left)  # type: ignore[attr-defined]
            self.ordered.append(step)
            _, first, upto = self.chunks[step]
            assert self.book.ship(HANDOVER, step, first, upto, len(left) == 1) is None

    @rule(step=st.integers(0, 4), layer=st.integers(0, LAYERS - 1))
    def signal(self, step: int, layer: int) -> None:
        self.signals.layer_done(step, layer)
        self.written.add((step, layer))

    @rule(step=st.integers(0, 4))
    def end_step(self, step: int) -> None:
        self.signals.step_done(step)
        self.written |= {(done, layer) for done in range(step + 1) for layer in range(LAYERS)}

    @rule()
    def send(self) -> None:
        for run in _all_runs(self.book):
            for block in range(run.first, run.upto):
                for layer in run.layers:
                    assert (block, layer) not in self.sent, "handed out twice"
                    self.sent.add((block, layer))

    @invariant()
    def nothing_leaves_early_and_everything_in_the_end(self) -> None:
        due = {
            (block, layer)
            for step, first, upto in self.chunks
            if step in self.ordered and self.opened
            for block in range(first, upto)
            for layer in range(LAYERS)
            if (step, layer) in self.written
        }
        assert self.sent <= due
        assert self.book.finished(HANDOVER) <= (len(self.sent) == (self.upto - self.first) * LAYERS)

    def teardown(self) -> None:
        self.open()
        while len(self.ordered) < len(self.chunks):
            step, first, upto = next(chunk for chunk in self.chunks if chunk[0] not in self.ordered)
            self.ordered.append(step)
            self.book.ship(HANDOVER, step, first, upto, len(self.ordered) == len(self.chunks))
        self.end_step(4)
        self.send()
        assert self.book.finished(HANDOVER)
        assert len(self.sent) == (self.upto - self.first) * LAYERS


TestAnyOrder = AnyOrder.TestCase


@given(st.permutations(list(range(LAYERS))))
def test_layers_in_any_order_leave_once_each(layers: list[int]) -> None:
    book, signals = _book()
    book.open(HANDOVER, 0, 1)
    book.ship(HANDOVER, 1, 0, 1, True)
    sent: list[int] = []
    for layer in layers:
        signals.layer_done(1, layer)
        sent += [layer for run in _all_runs(book) for layer in run.layers]
    assert sent == layers
    assert book.finished(HANDOVER)
