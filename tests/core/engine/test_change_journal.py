"""Whoever is told what changed knows, once all of it was taken, exactly the names that the index has."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core.config import DECODE, PREFILL, Role, WorkerConfig
from baton.core.engine.change_journal import NOTES_MAX, CachedKeysChanged, PhaseNotes, PrefixJournal
from baton.core.engine.orders import ReportChanges
from baton.core.engine.prefix import Key, PrefixIndex
from baton.core.engine.request import Phase, Serial
from tests.support.driver import Driver, submission
from tests.support.workers import decode_config, prefill_config

BLOCKS = 8


class Listener:
    """Believes what it is told."""

    def __init__(self) -> None:
        self.names: set[bytes] = set()
        self.told = 0

    def hear(self, changed: CachedKeysChanged) -> None:
        if changed.fresh:
            self.names.clear()
        assert not set(changed.named) & set(changed.forgotten)
        assert not self.names & set(changed.named), "told twice"
        assert self.names >= set(changed.forgotten), "it never heard of what is gone"
        self.names |= set(changed.named)
        self.names -= set(changed.forgotten)
        self.told += len(changed.named) + len(changed.forgotten)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(st.one_of(st.integers(0, BLOCKS - 1), st.sampled_from(["take", "again"])), max_size=120), st.integers(1, 5))
def test_a_listener_catches_up_however_little_it_takes_at_a_time(acts: list[int | str], keys_max: int) -> None:
    index, listener = PrefixIndex(b"secret", b"model", BLOCKS), Listener()
    journal, root = index.keep_journal(), index.root(b"")
    for number, act in enumerate(acts):
        if act == "take":
            listener.hear(journal.take(keys_max))
        elif act == "again":
            journal = index.keep_journal()
        elif act in index.names():
            index.forget(act)
        else:
            # Few keys, so that a name is given up and taken again.
            index.publish([key := index.chain(root, bytes([number % 11]))], [root], [act])
            assert key in index.names().values()
    for _ in range(4 * BLOCKS):
        listener.hear(journal.take(keys_max))
    assert listener.names == set(index.names().values())


def test_what_comes_and_goes_between_two_takings_is_not_mentioned() -> None:
    journal = PrefixJournal(list, 10)
    journal.take(1)
    for _ in range(100):
        journal.changed(b"here and gone", True)
        journal.changed(b"here and gone", False)
    assert journal.take(9) == CachedKeysChanged()


def test_more_changes_than_can_be_kept_are_told_from_the_beginning() -> None:
    names: dict[bytes, None] = {}
    journal, listener = PrefixJournal(names.keys, 6), Listener()
    listener.hear(journal.take(9))
    for number in range(100):
        key = bytes([number])
        names[key] = None
        journal.changed(key, True)
        listener.hear(journal.take(1)) if number < 3 else None
        if number >= 3:
            del names[bytes([number - 3])]
            journal.changed(bytes([number - 3]), False)
        assert len(journal) <= 6
    while len(journal):
        listener.hear(journal.take(2))
    assert listener.names == set(names)


def _driver(role: Role | None = None) -> Driver:
    if role is PREFILL:
        return Driver(prefill_config())
    if role is DECODE:
        return Driver(decode_config())
    return Driver(WorkerConfig(slots=4, blocks=48, block_size=4, context_tokens=96, step_tokens=16))


def test_nothing_is_kept_until_it_is_asked_for() -> None:
    driver = _driver()
    driver.submit(submission(range(12), 4))
    driver.run()
    changes = driver.worker.changes(driver.now_us)
    assert (changes.names, changes.notes) == (CachedKeysChanged(), ())


def test_the_worker_tells_names_and_phases() -> None:
    driver = _driver()
    driver.submit(submission(range(12), 4, name="before"))
    driver.run()
    driver.send(ReportChanges())
    driver.now_us = 1000
    (serial,) = driver.submit(submission(range(50, 60), 4, name="after"))
    driver.run()
    changes = driver.worker.changes(driver.now_us + 500)
    assert changes.names.fresh
    assert set(changes.names.named) == set(driver.worker.scheduler.pool.prefix.names().values())
    assert [note.phase for note in changes.notes] == [Phase.RUNNING_PREFILL, Phase.RUNNING_DECODE, Phase.FINISHED]
    assert {note.serial for note in changes.notes} == {serial}
    assert {note.ago_us for note in changes.notes} == {500 + driver.now_us - 1000}
    assert driver.worker.changes(driver.now_us).names == CachedKeysChanged()
    driver.send(ReportChanges())
    assert driver.worker.changes(driver.now_us).names.fresh, "whoever asks again knows nothing"


def test_notes_are_bounded() -> None:
    notes = PhaseNotes()
    for number in range(NOTES_MAX + 5):
        notes.note(Serial(number), Phase.FINISHED, number)
    kept = notes.take(NOTES_MAX + 5)
    assert (len(kept), kept[-1].serial, kept[-1].ago_us) == (NOTES_MAX, NOTES_MAX + 4, 1)
    assert notes.take(0) == ()


def test_an_instance_that_only_prefills_tells_names_but_no_phases() -> None:
    """Its serials are its own: nobody has heard of them."""
    driver = _driver(PREFILL)
    driver.send(ReportChanges())
    assert driver.worker.scheduler.notes is None
    assert driver.worker.scheduler.pool.prefix.journal is not None
    assert driver.worker.changes(0).names.fresh


def test_a_key_is_one_of_the_index() -> None:
    index = PrefixIndex(b"secret", b"model", 2)
    root = index.root(b"")
    index.publish([key := Key(index.chain(root, b"tokens"))], [root], [1])
    assert index.keep_journal().take(9) == CachedKeysChanged(True, (key,), ())
