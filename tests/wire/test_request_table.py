"""RequestTable: each ticket and each serial ends exactly once, and abandoned requests are cancelled."""

from __future__ import annotations

from collections import Counter, deque

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from baton.core.config import WorkerConfig
from baton.core.engine.driver import Answer, WorkerDriver
from baton.core.engine.orders import Accepted, Cancel, Drain, StopAt
from baton.core.engine.plan import Logprobs
from baton.core.engine.prefix import PrefixIndex
from baton.core.engine.request import RequestId, Sampling, Submission, frozen_tokens
from baton.core.engine.worker import Launch, StepDone, Worker
from baton.core.errors import IllegalTransition, Refusal, RefusalCode
from baton.core.state_machine import StateMachine
from baton.executor.scripted import ScriptedExecutor, undisturbed
from baton.wire.engine_messages import (
    WIRE_VERSION,
    FailedMessage,
    FromEngine,
    ReadyMessage,
    ToEngine,
    WireError,
    decode_from_engine,
    decode_to_engine,
    encode_from_engine,
    encode_to_engine,
    refused,
)
from baton.wire.request_table import (
    TRANSITIONS,
    EngineFailed,
    EngineReady,
    EntryMove,
    EntryState,
    GroupAccepted,
    GroupDeclined,
    LostEntry,
    News,
    RequestProgress,
    RequestTable,
    RequestTableClosed,
    TableNews,
)
from baton.wire.worker_messages import message_of
from tests.support.driver import VOCABULARY, shape_of
from tests.wire.steps import GAUGES, step

FULL = Refusal(RefusalCode.QUEUE_FULL, "full", 1)
NOTHING = TableNews([], [])


def asks(count: int = 1, max_tokens: int | None = None) -> list[Submission]:
    return [
        Submission(RequestId(f"r{at}"), frozen_tokens([1, 2, 3 + at]), Sampling(seed=at, temperature=0.0), max_tokens)
        for at in range(count)
    ]


def opened(*serials: int) -> RequestTable:
    """A desk at which one group is open as these serials."""
    table = RequestTable()
    message = table.submit(asks(len(serials)))
    assert table.take(Accepted(message.ticket, serials)) == TableNews([GroupAccepted(message.ticket, serials)], [])
    return table


def heard(took: TableNews) -> list[News | RequestProgress]:
    """All that clients hear, one by one."""
    return [*took.news, *(took.step.rows() if took.step is not None else ())]


def only(took: TableNews) -> RequestProgress:
    (news,) = heard(took)
    assert isinstance(news, RequestProgress)
    assert not took.orders
    return news


# ── tickets ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_tickets_count_from_zero_and_the_group_travels_in_its_order() -> None:
    table = RequestTable()
    messages = [table.submit(asks(2)), table.submit(asks(1))]
    assert [message.ticket for message in messages] == [0, 1]
    assert [item.request_id for item in messages[0].group] == ["r0", "r1"]
    assert (table.open_tickets, table.open_serials, table.open_requests) == (2, 0, 2)


def test_an_accepted_ticket_becomes_its_serials() -> None:
    table = opened(7, 8)
    assert (table.open_tickets, table.open_serials, table.open_requests) == (0, 2, 2)


def test_a_refused_ticket_ends_with_the_refusal() -> None:
    table = RequestTable()
    ticket = table.submit(asks()).ticket
    assert table.take(refused(ticket, FULL)) == TableNews([GroupDeclined(ticket, FULL)], [])
    assert table.open_requests == 0


def test_an_answer_to_an_unknown_ticket_is_an_error_that_names_it() -> None:
    for answer in (Accepted(5, (1,)), refused(5, FULL)):
        with pytest.raises(WireError, match="ticket 5"):
            RequestTable().take(answer)


def test_a_second_answer_to_a_ticket_is_an_error() -> None:
    table = opened(7)
    for answer in (Accepted(0, (8,)), refused(0, FULL)):
        with pytest.raises(WireError, match="ticket 0"):
            table.take(answer)


@pytest.mark.parametrize("serials", [(7,), (8, 8)])
def test_a_serial_given_twice_is_an_error_and_changes_nothing(serials: tuple[int, ...]) -> None:
    table = opened(7)
    ticket = table.submit(asks(len(serials))).ticket
    with pytest.raises(WireError, match=f"ticket {ticket}"):
        table.take(Accepted(ticket, serials))
    assert (table.open_tickets, table.open_serials) == (1, 1)


# ── abandoned before the answer ──────────────────────────────────────────────────────────────────────────────────────────


def test_what_is_accepted_after_the_client_left_is_cancelled_and_never_heard_of() -> None:
    table = RequestTable()
    ticket = table.submit(asks(2)).ticket
    table.abandon(ticket)
    table.abandon(ticket)
    assert table.take(Accepted(ticket, (7, 8))) == TableNews([], [Cancel(7), Cancel(8)])
    assert table.open_requests == 2  # the engine still has them: a drain waits for their ends
    assert table.cancel(7) is None
    assert table.stop(8, 0) is None
    assert table.take(step([(7, [1, 2])])) == NOTHING
    assert table.late == 1
    assert table.take(step([(7, [3])], ended=[7, 8])) == NOTHING
    assert table.open_requests == 0


def test_a_refusal_after_the_client_left_is_swallowed() -> None:
    table = RequestTable()
    ticket = table.submit(asks()).ticket
    table.abandon(ticket)
    assert table.take(refused(ticket, FULL)) == NOTHING
    assert table.open_requests == 0


def test_abandoning_after_the_answer_does_nothing() -> None:
    table = opened(7)
    table.abandon(0)
    assert only(table.take(step([(7, [1])]))).tokens == [1]
    assert table.cancel(7) == Cancel(7)


# ── tokens ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_step_brings_each_row_its_own_tokens_and_then_the_ends_without_a_row() -> None:
    table = opened(7, 8, 9)
    logprobs = Logprobs(
        1,
        np.array([-0.5, -1.5], dtype=np.float32),
        np.array([[3], [5]], dtype=np.int32),
        np.array([[-0.5], [-1.5]], dtype=np.float32),
    )
    news = heard(table.take(step([(9, [4]), (7, [5, 6])], ended=[8, 7], started=[(9, 16)], logprobs=(logprobs,))))
    assert len(news) == 3
    nine, seven, eight = (item for item in news if isinstance(item, RequestProgress))
    assert (nine.serial, nine.tokens, nine.logprobs, nine.cached_tokens, nine.ended) == (9, [4], None, 16, None)
    assert (seven.serial, seven.tokens, seven.cached_tokens) == (7, [5, 6], None)
    assert seven.logprobs == [(-0.5, ((3, -0.5),)), (-1.5, ((5, -1.5),))]
    assert seven.ended is not None
    assert (eight.serial, eight.tokens, eight.logprobs) == (8, [], None)
    assert eight.ended is not None
    assert eight.ended.serial == 8
    assert table.open_serials == 1


def test_tokens_after_the_end_are_an_error_that_names_the_serial_and_changes_nothing() -> None:
    table = opened(7, 8)
    assert only(table.take(step([(7, [1])], ended=[7]))).ended is not None
    with pytest.raises(WireError, match="serial 7,"):
        table.take(step([(8, [1]), (7, [2, 3])], ended=[8]))
    assert table.open_serials == 1


def test_what_was_accepted_in_an_earlier_conversation_is_dropped_and_counted() -> None:
    table = RequestTable()
    assert table.take(step([(3, [1])], ended=[3])) == NOTHING
    table.submit(asks())
    table.take(Accepted(0, (7,)))
    assert table.take(step([(4, [1])], ended=[5])) == NOTHING
    assert table.late == 4


def test_a_second_end_is_an_error_that_names_the_serial_and_changes_nothing() -> None:
    table = opened(7, 8)
    table.take(step(ended=[7]))
    for output in (step([(8, [1])], ended=[8, 7]), step([(7, [1])], ended=[7]), step(ended=[8, 8])):
        with pytest.raises(WireError, match=r"serial [78],"):
            table.take(output)
    assert (table.open_serials, table.late) == (1, 0)
    assert only(table.take(step([(8, [1])], ended=[8]))).tokens == [1]


# ── told to stop ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_an_order_to_end_is_given_once() -> None:
    for first in (lambda table: table.cancel(7) == Cancel(7), lambda table: table.stop(7, 2) == StopAt(7, 2)):
        table = opened(7)
        assert first(table)
        assert table.cancel(7) is None
        assert table.stop(7, 3) is None


def test_after_an_order_to_end_tokens_and_the_end_still_come() -> None:
    table = opened(7)
    table.stop(7, 1)
    assert only(table.take(step([(7, [5])]))).tokens == [5]
    assert only(table.take(step(ended=[7]))).ended is not None
    assert table.cancel(7) is None
    assert table.open_requests == 0


def test_orders_for_serials_that_never_were_are_none() -> None:
    assert RequestTable().cancel(3) is None
    assert RequestTable().stop(3, 1) is None


# ── the engine comes, dies, is gone ──────────────────────────────────────────────────────────────────────────────────────


def test_coming_and_last_words_are_news() -> None:
    table = opened(7)
    ready = ReadyMessage(WIRE_VERSION, 1, 2, 3, 4, 5, "", GAUGES)
    assert table.take(ready) == TableNews([EngineReady(ready)], [])
    assert table.take(FailedMessage("no memory")) == TableNews([EngineFailed("no memory")], [])
    assert table.open_serials == 1  # whoever hears of it decides that it is lost


def test_a_loss_ends_everything_that_somebody_hears_of_exactly_once() -> None:
    table = opened(7, 8)
    table.cancel(8)
    waiting, left, unwanted = (table.submit(asks()).ticket for _ in range(3))
    table.abandon(left)
    table.abandon(unwanted)
    table.take(Accepted(unwanted, (9,)))
    assert table.lose("gone") == [LostEntry(waiting, None, "gone"), LostEntry(None, 7, "gone"), LostEntry(None, 8, "gone")]
    assert table.open_requests == 0
    assert table.lose("again") == []


def test_a_lost_request_may_be_tried_elsewhere() -> None:
    table = opened(7)
    assert [lost.retryable for lost in table.lose("gone")] == [True]


def test_a_lost_desk_takes_no_submission_and_drops_what_still_comes() -> None:
    table = opened(7)
    table.lose("the cable is out")
    with pytest.raises(RequestTableClosed, match="the cable is out"):
        table.submit(asks())
    assert table.cancel(7) is None
    messages: list[FromEngine] = [step([(7, [1])], ended=[7]), Accepted(9, (1,)), refused(9, FULL), FailedMessage("late")]
    for message in messages:
        assert table.take(message) == NOTHING
    assert table.late == len(messages)


def test_what_is_not_in_the_table_is_a_bug_and_says_so() -> None:
    assert EntryState.GONE not in {state for state, _ in TRANSITIONS}
    with pytest.raises(IllegalTransition, match="STOPPING cannot take the move LET_GO"):
        StateMachine(TRANSITIONS, "an entry").after(EntryState.STOPPING, EntryMove.LET_GO)


# ── both ends together ───────────────────────────────────────────────────────────────────────────────────────────────────


class Engine:
    """A real Worker with a scripted executor behind real bytes; no process."""

    def __init__(self, config: WorkerConfig) -> None:
        self.executor = ScriptedExecutor(shape_of(config), VOCABULARY)
        self.worker = Worker(config, PrefixIndex(b"secret", self.executor.fingerprint, config.blocks))
        self.driver = WorkerDriver(self.worker, lambda: 0, launch=self._launch, answer=self._answer)
        self.said: deque[bytes] = deque()

    def hear(self, message: ToEngine) -> None:
        self.driver.handle(decode_to_engine(encode_to_engine(message)))

    def turn(self) -> None:
        self.driver.tick()
        if self.driver.steps_in_flight:
            self.driver.handle(StepDone(self.executor.collect()))

    def _launch(self, launch: Launch) -> None:
        self.executor.launch(launch.plan)

    def _answer(self, answer: Answer) -> None:
        self.said.append(encode_from_engine(message_of(answer, self.worker)))


def converse(table: RequestTable, engine: Engine) -> list[News | RequestProgress]:
    """Until nothing is open."""
    news: list[News | RequestProgress] = []
    while table.open_requests:
        while engine.said:
            took = table.take(decode_from_engine(engine.said.popleft()))
            news += heard(took)
            for order in took.orders:
                engine.hear(order)
        engine.turn()
    return news


CONFIG = WorkerConfig(slots=2, blocks=32, block_size=4, context_tokens=64, step_tokens=16, waiting_max=4)


def test_desk_and_worker_understand_each_other() -> None:
    table, engine = RequestTable(), Engine(CONFIG)
    group = asks(2, max_tokens=5)
    engine.hear(table.submit(group))
    news = converse(table, engine)
    assert news[0] == GroupAccepted(0, (0, 1))
    for serial, item in enumerate(group):
        heard = [one for one in news if isinstance(one, RequestProgress) and one.serial == serial]
        expected = undisturbed(item.prompt, item.sampling, 5, VOCABULARY)
        assert [token for one in heard for token in one.tokens] == list(expected)
        assert [one.ended is not None for one in heard] == [False] * (len(heard) - 1) + [True]
    assert engine.worker.is_idle


def test_a_request_abandoned_before_the_answer_leaves_the_worker_idle() -> None:
    table, engine = RequestTable(), Engine(CONFIG)
    engine.hear(table.submit(asks(3, max_tokens=60)))
    table.abandon(0)
    assert converse(table, engine) == []
    assert engine.worker.is_idle
    assert engine.worker.gauges().steps < 10


def test_a_stop_while_it_waits_and_a_drain_reach_the_worker_and_their_answers_come_back() -> None:
    table, engine = RequestTable(), Engine(CONFIG)
    engine.hear(table.submit(asks(1, max_tokens=5)))
    table.take(decode_from_engine(engine.said.popleft()))
    order = table.stop(0, 0)
    assert order is not None
    engine.hear(order)
    engine.hear(Drain())
    engine.hear(table.submit(asks()))
    end, declined = converse(table, engine)
    assert isinstance(end, RequestProgress)
    assert end.ended is not None
    assert isinstance(declined, GroupDeclined)
    assert declined.refusal.code is RefusalCode.DRAINING


# ── any conversation at all ──────────────────────────────────────────────────────────────────────────────────────────────


class AnyConversation(RuleBasedStateMachine):
    """An engine that says whatever it may, clients that do whatever they like; judged only by what clients hear."""

    def __init__(self) -> None:
        super().__init__()
        self.table = RequestTable()
        self.lost = False
        self.submitted = 0
        self.unanswered: dict[int, int] = {}
        """What the engine has not answered: ticket → size of the group."""
        self.running: list[int] = []
        """What the engine has not ended."""
        self.over: list[int] = []
        self.next_serial = 0
        self.left: set[int] = set()
        """Tickets whose client left before the answer."""
        self.owner: dict[int, int] = {}
        """Serial → ticket."""
        self.sent: dict[int, list[int]] = {}
        self.heard: dict[int, list[int]] = {}
        self.ticket_ends: Counter[int] = Counter()
        self.serial_ends: Counter[int] = Counter()
        self.orders: Counter[int] = Counter()
        """How often the engine was told to end a serial."""

    # What clients do.

    @precondition(lambda self: not self.lost)
    @rule(size=st.integers(1, 3))
    def submit(self, size: int) -> None:
        message = self.table.submit(asks(size))
        assert message.ticket == self.submitted
        self.submitted += 1
        self.unanswered[message.ticket] = size

    @rule(ticket=st.integers(0, 12))
    def abandon(self, ticket: int) -> None:
        if ticket in self.unanswered and not self.lost:
            self.left.add(ticket)
        self.table.abandon(ticket)

    @rule(serial=st.integers(0, 20), keep=st.one_of(st.none(), st.integers(0, 5)))
    def let_go(self, serial: int, keep: int | None) -> None:
        order = self.table.cancel(serial) if keep is None else self.table.stop(serial, keep)
        if serial in self.running and not self.lost and not self.orders[serial]:
            assert order == (Cancel(serial) if keep is None else StopAt(serial, keep))
            self.orders[serial] += 1
        else:
            assert order is None

    # What the engine says.

    @precondition(lambda self: self.unanswered)
    @rule(data=st.data(), accepted=st.sampled_from([True, True, True, False]))
    def answer(self, data: st.DataObject, accepted: bool) -> None:
        ticket = data.draw(st.sampled_from(sorted(self.unanswered)))
        size = self.unanswered.pop(ticket)
        if not accepted:
            self._take(refused(ticket, FULL))
            return
        serials = tuple(range(self.next_serial, self.next_serial + size))
        self.next_serial += size
        self.running += serials
        self.owner.update(dict.fromkeys(serials, ticket))
        self._take(Accepted(ticket, serials))

    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        known = st.lists(st.sampled_from(self.running), unique=True) if self.running else st.just([])
        yields, ends = data.draw(known), data.draw(known)
        rows = [(serial, data.draw(st.lists(st.integers(0, 99), max_size=3))) for serial in yields]
        for serial, tokens in rows:
            if not self.lost:
                self.sent.setdefault(serial, []).extend(tokens)
        self.running = [serial for serial in self.running if serial not in ends]
        self.over += ends
        self._take(step(rows, ended=ends))

    @precondition(lambda self: self.over and not self.lost)
    @rule(data=st.data())
    def row_after_the_end(self, data: st.DataObject) -> None:
        serial = data.draw(st.sampled_from(self.over))
        with pytest.raises(WireError, match=f"serial {serial},"):
            self.table.take(step([(serial, [1])]))

    @precondition(lambda self: self.over and not self.lost)
    @rule(data=st.data())
    def second_end(self, data: st.DataObject) -> None:
        serial = data.draw(st.sampled_from(self.over))
        with pytest.raises(WireError, match=f"serial {serial},"):
            self.table.take(step(ended=[*self.running, serial]))

    @precondition(lambda self: self.next_serial > 4)
    @rule()
    def lose(self) -> None:
        for lost in self.table.lose("gone"):
            assert (lost.ticket is None) != (lost.serial is None)
            if lost.ticket is not None:
                self._ticket_ends(lost.ticket)
            if lost.serial is not None:
                self._serial_ends(lost.serial)
        self.lost = True

    # What clients hear.

    def _take(self, message: FromEngine) -> TableNews:
        took = self.table.take(message)
        for order in took.orders:
            assert isinstance(order, Cancel)
            assert self.owner[order.serial] in self.left
            self.orders[order.serial] += 1
        for news in heard(took):
            self._hear(news)
        return took

    def _hear(self, news: News | RequestProgress) -> None:
        match news:
            case GroupAccepted(ticket, serials):
                self._ticket_ends(ticket)
                assert all(self.owner[serial] == ticket for serial in serials)
                self.heard.update({serial: [] for serial in serials})
            case GroupDeclined(ticket):
                self._ticket_ends(ticket)
            case RequestProgress(serial, tokens):
                assert not self.serial_ends[serial], f"serial {serial} was heard of after its end"
                self.heard[serial] += tokens
                if news.ended is not None:
                    self._serial_ends(serial)
            case _:
                raise AssertionError(news)

    def _ticket_ends(self, ticket: int) -> None:
        assert ticket not in self.left
        self.ticket_ends[ticket] += 1

    def _serial_ends(self, serial: int) -> None:
        assert serial in self.heard
        self.serial_ends[serial] += 1

    @invariant()
    def nothing_ends_twice_and_orders_are_given_once(self) -> None:
        for counts in (self.ticket_ends, self.serial_ends, self.orders):
            assert all(count <= 1 for count in counts.values())

    @invariant()
    def what_was_accepted_for_nobody_is_cancelled(self) -> None:
        if not self.lost:
            assert all(self.orders[serial] == 1 for serial, ticket in self.owner.items() if ticket in self.left)

    @invariant()
    def tokens_arrive_whole_and_in_order(self) -> None:
        assert all(tokens == self.sent.get(serial, []) for serial, tokens in self.heard.items())

    @invariant()
    def the_book_is_as_long_as_what_is_open(self) -> None:
        if self.lost:
            assert self.table.open_requests == 0
        else:
            assert (self.table.open_tickets, self.table.open_serials) == (len(self.unanswered), len(self.running))

    def teardown(self) -> None:
        """Let the engine finish: then everything has ended once, or nobody wanted to hear of it."""
        for ticket in sorted(self.unanswered):
            self._take(refused(ticket, FULL))
        self._take(step(ended=self.running))
        assert self.table.open_requests == 0
        assert all(self.serial_ends[serial] == 1 for serial in self.heard)
        assert all(self.ticket_ends[ticket] == 1 for ticket in range(self.submitted) if ticket not in self.left)


TestAnyConversation = AnyConversation.TestCase
TestAnyConversation.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
