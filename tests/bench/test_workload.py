from __future__ import annotations

from itertools import islice

import pytest

from baton.bench.traces import TracedRequest
from baton.bench.workload import (
    BenchSession,
    ChatConversation,
    Recipe,
    Reply,
    Round,
    TokenConversation,
    TokenRange,
    WorkloadShape,
    fixed_sessions,
    poisson_arrivals,
    traced_sessions,
)


def prompt_of(session: BenchSession, seed: int = 0) -> list[int]:
    return TokenConversation(Recipe(seed), session).ask(0)


def test_equal_seeds_give_equal_prompts_and_others_do_not() -> None:
    sessions = list(fixed_sessions(2, Round(50, 1), WorkloadShape()))
    assert prompt_of(sessions[0]) == prompt_of(sessions[0])
    assert prompt_of(sessions[0]) != prompt_of(sessions[1])
    assert prompt_of(sessions[0]) != prompt_of(sessions[0], seed=1)


def test_ids_stay_in_the_range() -> None:
    drawn = Recipe(0, TokenRange(5, 8)).draw(1000, 1)
    assert set(drawn) == {5, 6, 7}


def test_groups_share_their_prefix_and_nothing_else() -> None:
    sessions = list(fixed_sessions(4, Round(10, 1), WorkloadShape(prefix_tokens=20, prefix_groups=2)))
    prompts = [prompt_of(session) for session in sessions]
    assert [len(prompt) for prompt in prompts] == [30] * 4
    assert prompts[0][:20] == prompts[2][:20] != prompts[1][:20] == prompts[3][:20]
    assert len({tuple(prompt[20:]) for prompt in prompts}) == 4


def test_equal_blocks_of_a_trace_become_equal_tokens() -> None:
    traced = [TracedRequest(0.0, 1100, 1, (7, 8, 9)), TracedRequest(0.0, 1500, 1, (7, 8, 10))]
    a, b = (prompt_of(session) for session in traced_sessions(traced, WorkloadShape()))
    assert (len(a), len(b)) == (1100, 1500)
    assert a[:1024] == b[:1024]
    assert a[1024:1100] != b[1024:1100]


def test_token_history_carries_prompts_and_answers() -> None:
    session = BenchSession(0, (Round(3, 2), Round(4, 2)))
    conversation = TokenConversation(Recipe(), session)
    first = list(conversation.ask(0))
    conversation.add_reply(0, Reply("", (11, 12)))
    second = conversation.ask(1)
    assert second[:5] == [*first, 11, 12]
    assert len(second) == 9


def test_history_keeps_its_length_when_the_server_hides_token_ids() -> None:
    conversation = TokenConversation(Recipe(), BenchSession(0, (Round(3, 2), Round(4, 2))))
    conversation.ask(0)
    conversation.add_reply(0, Reply("text", ()))
    assert len(conversation.ask(1)) == 9


def test_chat_history_alternates_roles_after_the_shared_system_message() -> None:
    session = BenchSession(0, (Round(3, 2), Round(4, 2)), prefix_group=0, prefix_tokens=5)
    conversation = ChatConversation(Recipe(), session)
    conversation.ask(0)
    conversation.add_reply(0, Reply("answer", ()))
    messages = conversation.ask(1)
    assert [message.role for message in messages] == ["system", "user", "assistant", "user"]
    assert len(messages[0].content.split()) == 5
    assert messages[2].content == "answer"


def test_poisson_arrivals_have_their_rate() -> None:
    times = list(islice(poisson_arrivals(50.0, seed=1), 5000))
    assert times == sorted(times)
    assert times[-1] == pytest.approx(100.0, rel=0.1)


def test_the_times_of_a_trace_are_replayed_at_speed() -> None:
    traced = [TracedRequest(0.0, 1, 1), TracedRequest(8.0, 1, 1)]
    assert [session.due_s for session in traced_sessions(traced, WorkloadShape(), speed=4.0)] == [0.0, 2.0]
    assert [session.due_s for session in traced_sessions(traced, WorkloadShape())] == [None, None]
