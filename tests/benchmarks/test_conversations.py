from __future__ import annotations

from pathlib import Path

import pytest

from baton.bench.traces import TracedRequest
from baton.sim.workload import BadWorkload
from benchmarks.conversations import SimulatedConversations, Turn, conversations_of, find_conversations, read_conversations
from benchmarks.runner import NoTrace


def rows(*lengths: tuple[int, int]) -> list[TracedRequest]:
    return [TracedRequest(None, asked, answered) for asked, answered in lengths]


def test_a_row_that_holds_the_whole_one_before_goes_on_with_it() -> None:
    conversations = conversations_of(rows((10, 5), (20, 5), (3, 9), (12, 1), (14, 2)))
    assert conversations == [(Turn(10, 5), Turn(5, 5)), (Turn(3, 9),), (Turn(12, 1), Turn(1, 2))]


def test_equal_seeds_draw_equal_sessions_of_several_rounds() -> None:
    conversations = [(Turn(n, 5), Turn(n, 6)) for n in range(1, 50)] + [(Turn(999, 1),)]
    sessions = SimulatedConversations(count=10, input_scale=2.0, context_tokens=10_000, max_tokens=32)
    calls = sessions.drawn(conversations, seed=1)
    assert calls == sessions.drawn(conversations, seed=1) != sessions.drawn(conversations, seed=2)
    assert sorted({call.session for call in calls}) == list(range(10))
    assert len(calls) == 20
    assert all(call.input_tokens % 2 == 0 and call.at_us is None for call in calls)
    assert {call.output_tokens for call in calls} == {5, 6}
    assert {call.max_tokens for call in calls} == {32}


def test_a_session_ends_before_the_round_that_does_not_fit() -> None:
    sessions = SimulatedConversations(count=1, input_scale=1.0, context_tokens=100, max_tokens=20, think_us=7)
    calls = sessions.drawn([(Turn(30, 10), Turn(30, 10), Turn(30, 10))], seed=0)
    assert [(call.input_tokens, call.think_us) for call in calls] == [(30, 0), (30, 7)]


def test_too_few_conversations_are_refused() -> None:
    with pytest.raises(BadWorkload, match="3 sessions"):
        SimulatedConversations(3, 1.0, 100, 10).drawn([(Turn(1, 1), Turn(1, 1)), (Turn(1, 1),)], seed=0)


def test_the_file_is_found_in_the_folder_of_traces_or_missed_with_a_hint(tmp_path: Path) -> None:
    with pytest.raises(NoTrace, match="BATON_TRACES"):
        find_conversations(None, tmp_path)
    path = tmp_path / "some_sharegpt_lengths.csv"
    path.write_text("num_prefill_tokens,num_decode_tokens\n5,6\n20,7\n")
    assert find_conversations(None, tmp_path) == path
    assert read_conversations(path) == [(Turn(5, 6), Turn(9, 7))]
