"""However answers wait to be read: their sum adds up and stays under the bound, and who reads is closed last."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from baton.core.http.unsent_answers import STOPPED_S, UnsentAnswers


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 40), st.integers(0, 30)), max_size=30), st.integers(0, 100))
def test_the_sum_is_of_what_was_noted_last_and_after_a_drop_it_is_within_the_bound(
    notes: list[tuple[int, int, int]], bound: int
) -> None:
    answers: UnsentAnswers[int] = UnsentAnswers(bound)
    plain: dict[int, int] = {}
    for one, unsent, read_s in notes:
        answers.note(one, unsent, read_s)
        plain[one] = unsent
        assert answers.bytes == sum(plain.values())
    dropped = answers.drop(30.0)
    left = sum(unsent for one, unsent in plain.items() if one not in dropped)
    assert answers.bytes == left <= bound
    if dropped:
        assert left + plain[dropped[-1]] > bound, "no more than need be"


def test_who_has_stopped_reading_goes_before_who_reads_and_the_largest_first() -> None:
    answers: UnsentAnswers[str] = UnsentAnswers(100)
    now_s = 2 * STOPPED_S
    for name, unsent, read_s in (
        ("reads", 90, now_s),
        ("stopped", 20, 0.0),
        ("holds most", 30, STOPPED_S),
        ("late", 5, 11.0),
    ):
        answers.note(name, unsent, read_s)
    assert answers.drop(now_s) == ["holds most", "stopped"]
    assert answers.drop(now_s) == []
    answers.note("another", 95, now_s)
    assert answers.drop(now_s) == ["another"]
    answers.forget("reads")
    assert answers.bytes == 5
