from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.api.stop_strings import StopScanner

LETTERS = st.text("abc", max_size=30)
STOPS = st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=4)


def one_character_at_a_time(text: str, stops: list[str], include: bool) -> tuple[str, bool]:
    """The definition: the first moment at which the text ends in a stop string, the longest such."""
    for end in range(1, len(text) + 1):
        matching = [stop for stop in stops if text[:end].endswith(stop)]
        if matching:
            return text[: end if include else end - max(map(len, matching))], True
    return text, False


@given(pieces=st.lists(LETTERS, max_size=8), stops=STOPS, include=st.booleans())
def test_any_cutting_gives_what_one_character_at_a_time_gives(pieces: list[str], stops: list[str], include: bool) -> None:
    scanner = StopScanner(stops, include)
    shown = "".join([scanner.push(piece) for piece in pieces]) + scanner.flush()
    assert (shown, scanner.hit) == one_character_at_a_time("".join(pieces), stops, include)


@given(text=LETTERS, stops=STOPS)
def test_text_is_held_only_while_it_may_begin_a_stop_string(text: str, stops: list[str]) -> None:
    scanner = StopScanner(stops)
    shown = ""
    for i, char in enumerate(text):
        shown += scanner.push(char)
        if scanner.hit:
            return
        held = text[len(shown) : i + 1]
        assert held == "" or any(stop.startswith(held) and stop != held for stop in stops)


def test_a_stop_string_over_chunk_borders_is_found() -> None:
    scanner = StopScanner(["END"])
    assert [scanner.push(piece) for piece in ("so E", "N", "E", "ND", "more")] == ["so ", "", "EN", "", ""]
    assert scanner.hit


def test_what_was_held_comes_out_at_the_end() -> None:
    scanner = StopScanner(["END"])
    assert scanner.push("EN") == ""
    assert (scanner.flush(), scanner.flush(), scanner.hit) == ("EN", "", False)


@pytest.mark.parametrize("stops", [[], [""], ["a", ""]])
def test_an_empty_stop_string_is_an_error_of_ours(stops: list[str]) -> None:
    with pytest.raises(ValueError, match="stop strings"):
        StopScanner(stops)
