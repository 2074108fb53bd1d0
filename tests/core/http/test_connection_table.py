"""However connections come and go: never too many, only waiting ones give way, the longest first, and counts add up."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from baton.core.http.connection_table import Admitted, ConnectionTable, NoRoom

STEPS = st.lists(
    st.tuples(st.sampled_from(["open", "begin", "wait", "close", "promote"]), st.integers(0, 9), st.sampled_from("abc"))
)


class Book:
    """The same, kept the plain way."""

    def __init__(self) -> None:
        self.address: dict[int, str] = {}
        self.waiting: list[int] = []
        self.spare: list[int] = []

    def ordinary(self) -> list[int]:
        return [one for one in self.address if one not in self.spare]

    def first_waiting(self, places: list[int]) -> int | None:
        return next((one for one in self.waiting if one in places), None)

    def close(self, one: int) -> None:
        self.address.pop(one, None)
        if one in self.waiting:
            self.waiting.remove(one)
        if one in self.spare:
            self.spare.remove(one)


@given(STEPS, st.integers(1, 5), st.none() | st.integers(1, 3), st.integers(0, 2))
def test_a_table_does_what_its_plain_description_says(
    steps: list[tuple[str, int, str]], most: int, each: int | None, spare: int
) -> None:
    table: ConnectionTable[int] = ConnectionTable(most, each, spare)
    book = Book()
    for what, one, address in steps:
        if what == "open" and one not in book.address:
            _open(table, book, one, address, most, each, spare)
        elif what == "promote" and one in book.spare:
            _promote(table, book, one, most)
        elif what == "begin" and one in book.address:
            table.begin(one)
            book.waiting = [other for other in book.waiting if other != one]
        elif what == "wait":
            table.wait(one)
            if one in book.address and one not in book.waiting:
                book.waiting.append(one)
        elif what == "close":
            table.close(one)
            book.close(one)
        assert list(table) == list(book.address)
        assert [one for one in table if table.is_spare(one)] == [one for one in book.address if one in book.spare]
        assert len(book.ordinary()) <= most
        assert len(book.spare) <= spare


def _open(table: ConnectionTable[int], book: Book, one: int, address: str, most: int, each: int | None, spare: int) -> None:
    outcome = table.open(one, address)
    if each is not None and list(book.address.values()).count(address) >= each:
        assert outcome is NoRoom.FROM_ADDRESS
        return
    longest, is_spare = None, False
    if len(book.ordinary()) >= most:
        longest = book.first_waiting(book.ordinary())
        is_spare = longest is None
    if is_spare and len(book.spare) >= spare:
        longest = book.first_waiting(book.spare)
        if longest is None:
            assert outcome is NoRoom.IN_ALL
            return
    assert outcome == Admitted(longest, is_spare)
    if longest is not None:
        book.close(longest)
    book.address[one] = address
    book.waiting.append(one)
    if is_spare:
        book.spare.append(one)


def _promote(table: ConnectionTable[int], book: Book, one: int, most: int) -> None:
    outcome = table.promote(one)
    longest = None
    if len(book.ordinary()) >= most:
        longest = book.first_waiting(book.ordinary())
        if longest is None:
            assert outcome is NoRoom.IN_ALL
            return
        book.close(longest)
    assert outcome == Admitted(longest)
    book.spare.remove(one)
    book.waiting = [*(other for other in book.waiting if other != one), one]


def test_a_busy_connection_never_gives_way() -> None:
    table: ConnectionTable[str] = ConnectionTable(2)
    table.open("busy", None)
    table.begin("busy")
    table.open("idle", None)
    assert table.open("new", None) == Admitted("idle")
    table.begin("new")
    assert table.open("another", None) is NoRoom.IN_ALL
    table.wait("busy")
    assert table.open("another", None) == Admitted("busy")
