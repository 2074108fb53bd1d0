"""The file store among what file systems, other processes and people do to it."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import resource
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from baton.core.errors import InvariantViolated
from baton.kv import file_store
from baton.kv.file_ledger import FileLock
from baton.kv.file_store import FileStore
from baton.kv.store import MISSING, BadStore, Store, StoreFailed, open_store, parse_size, parse_url
from baton.wire import envelope
from tests.kv.harm import HARMS, ServedBad, harmed
from tests.support.stores import Sample, put, sample, samples

ROOT = Path(__file__).parents[2]
SIZE = 1000
WHOLE = SIZE + envelope.HEADER_BYTES


@pytest.fixture
def draw() -> random.Random:
    return random.Random(5)


def opened(folder: Path, limit_objects: int | None = None) -> FileStore:
    """Every use counts, not only one a minute."""
    open_store(f"file:{folder}", timeout_s=10)
    return FileStore(str(folder), 10.0, None if limit_objects is None else limit_objects * WHOLE, touch_s=0)


def got(store: Store, *wanted: Sample) -> list[bytes | None]:
    into = [memoryview(bytearray(len(each.data))) for each in wanted]
    counts = store.get([each.name for each in wanted], into)
    return [None if count == MISSING else bytes(into[:count]) for into, count in zip(into, counts, strict=True)]


def there(store: Store, made: Sequence[Sample]) -> list[bool]:
    """Without using them."""
    names = {name for name, _ in store.names()}
    return [each.name in names for each in made]


def path_of(folder: Path, each: Sample) -> Path:
    layout, key = each.name.split("/")
    return folder / layout / key[:2] / key


# ── where things lie ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_an_object_is_a_file_below_its_layout_and_the_first_two_of_its_key(tmp_path: Path, draw: random.Random) -> None:
    store, made = opened(tmp_path), sample(draw)
    put(store, made)
    path = path_of(tmp_path, made)
    assert path.read_bytes() == made.data
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_name_leads_nowhere_else(tmp_path: Path) -> None:
    store = opened(tmp_path)
    for name in ("", "a/b", "../../etc/passwd", "0" * 16 + "/../" + "0" * 29, "0" * 16 + "/" + "0" * 32 + "\n"):
        with pytest.raises(InvariantViolated):
            store.look([name])


def test_what_is_not_ours_is_neither_counted_nor_removed(tmp_path: Path, draw: random.Random) -> None:
    store, made = opened(tmp_path, 2), samples(draw, 4, SIZE)
    put(store, made[0])
    layout, key = made[0].name.split("/")
    foreign = [
        tmp_path / "prefix.key", tmp_path / "notes.txt", tmp_path / layout / "README", tmp_path / layout / key[:2] / "x.tmp",
        tmp_path / layout / "zz" / key, tmp_path / layout / ("00" if key[:2] != "00" else "01") / key,
        tmp_path / ".writing" / "mine", tmp_path / "photos" / key[:2] / key,
    ]  # fmt: skip
    for path in foreign:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(5 * WHOLE))
    assert [name for name, _ in store.names()] == [made[0].name]
    assert put(store, *made[1:]) == [True] * 3
    store.drop([each.name for each in made])
    assert store.clear() == 0
    open_store(f"file:{tmp_path}")
    assert all(path.exists() for path in foreign)


def test_clearing_leaves_no_empty_folders(tmp_path: Path, draw: random.Random) -> None:
    store = opened(tmp_path)
    put(store, *samples(draw, 20))
    assert store.clear() == 20
    assert sorted(path.name for path in tmp_path.iterdir()) == [".ledger", ".writing"]


# ── the limit ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_least_recently_used_goes_first(tmp_path: Path, draw: random.Random) -> None:
    store, made = opened(tmp_path, 4), samples(draw, 6, SIZE)
    for each in made[:4]:
        put(store, each)
    got(store, made[0])
    store.look([made[1].name])
    for each in made[4:]:
        assert put(store, each) == [True]
    assert there(store, made) == [True, True, False, False, True, True]


def test_putting_what_is_there_is_using_it(tmp_path: Path, draw: random.Random) -> None:
    store, made = opened(tmp_path, 2), samples(draw, 3, SIZE)
    for each in (made[0], made[1], made[0], made[2]):
        assert put(store, each) == [True]
    assert there(store, made) == [True, False, True]


def test_of_one_call_the_beginning_of_the_chain_stays_longest(tmp_path: Path, draw: random.Random) -> None:
    store, made = opened(tmp_path, 4), samples(draw, 5, SIZE)
    put(store, *made[:4])
    put(store, made[4])
    assert there(store, made) == [True, True, True, False, True]
    got(store, *made)
    put(store, made[3])
    assert there(store, made) == [True, True, True, True, False]


def test_use_is_noted_once_a_minute_and_not_at_every_look(tmp_path: Path, draw: random.Random) -> None:
    store, made = open_store(f"file:{tmp_path}"), sample(draw)
    put(store, made)
    path = path_of(tmp_path, made)
    for age_s, noted in ((30, False), (90, True)):
        then = time.time_ns() - int(age_s * 1e9)
        for use in (lambda: store.look([made.name]), lambda: got(store, made), lambda: put(store, made)):
            os.utime(path, ns=(then, then))
            use()
            assert (path.stat().st_mtime_ns > then) is noted


def test_making_room_makes_some_more(tmp_path: Path, draw: random.Random) -> None:
    store, made = opened(tmp_path, 40), samples(draw, 41, SIZE)
    put(store, *made)
    assert store.stat().objects == 37, "a tenth of 40 goes, and one has come"


def test_the_limit_is_kept_by_objects_of_all_sizes(tmp_path: Path, draw: random.Random) -> None:
    store = opened(tmp_path, 10)
    for _ in range(200):
        put(store, sample(draw, draw.randint(0, 4 * SIZE)))
        assert store.stat().bytes <= 10 * WHOLE


def test_what_is_larger_than_the_limit_is_not_stored_and_drives_nobody_out(tmp_path: Path, draw: random.Random) -> None:
    store, made = opened(tmp_path, 3), samples(draw, 3, SIZE)
    put(store, *made)
    assert put(store, sample(draw, 4 * SIZE)) == [False]
    assert there(store, made) == [True] * 3


def test_two_that_share_a_folder_keep_the_limit_together(tmp_path: Path, draw: random.Random) -> None:
    stores = [opened(tmp_path, 10), opened(tmp_path, 10)]
    for each in samples(draw, 60, SIZE):
        assert put(draw.choice(stores), each) == [True]
        assert stores[0].stat().objects <= 10


def test_one_without_a_limit_is_counted_by_those_that_have_one(tmp_path: Path, draw: random.Random) -> None:
    put(opened(tmp_path), *samples(draw, 30, SIZE))
    put(opened(tmp_path, 10), sample(draw, SIZE))
    assert opened(tmp_path).stat().bytes <= 10 * WHOLE


def test_threads_keep_the_limit_together(tmp_path: Path) -> None:
    store = opened(tmp_path, 10)

    def fill(seed: int) -> int:
        own = random.Random(seed)
        return sum(put(store, sample(own, SIZE)) == [True] for _ in range(40))

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(fill, range(4))) == [40] * 4
    assert store.stat().bytes <= 10 * WHOLE


def test_what_others_remove_is_room_again(tmp_path: Path, draw: random.Random) -> None:
    """The ledger learns of it when room would have to be made: nobody is driven out for what is no longer there."""
    store, made = opened(tmp_path, 10), samples(draw, 14, SIZE)
    put(store, *made[:10])
    for each in made[:5]:
        path_of(tmp_path, each).unlink()
    put(store, *made[10:])
    assert there(store, made[5:]) == [True] * 9


@pytest.mark.parametrize("spoilt", [b"", b"nonsense", b"batonled" + bytes(3)])
def test_a_ledger_that_is_lost_or_spoilt_is_made_again(tmp_path: Path, draw: random.Random, spoilt: bytes) -> None:
    store, made = opened(tmp_path, 5), samples(draw, 9, SIZE)
    put(store, *made[:5])
    (tmp_path / ".ledger").unlink() if not spoilt else (tmp_path / ".ledger").write_bytes(spoilt)
    for each in made[5:]:
        assert put(store, each) == [True]
        assert store.stat().objects <= 5


# ── trouble with the file system ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("call", ["open", "ftruncate", "write", "rename"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS])
def test_no_room_is_an_answer(tmp_path: Path, draw: random.Random, monkeypatch: Any, call: str, number: int) -> None:
    store, made = opened(tmp_path, 10), samples(draw, 3, SIZE)
    put(store, made[0])
    with monkeypatch.context() as patch:
        patch.setattr(os, call, _failing(number))
        assert put(store, made[1]) == [False]
        if call != "open":
            assert got(store, *made) == [made[0].data, None, None]
    assert list((tmp_path / ".writing").iterdir()) == []
    assert put(store, *made) == [True] * 3
    assert got(store, *made) == [each.data for each in made]


def test_a_write_that_ends_halfway_leaves_nothing_and_costs_no_room(
    tmp_path: Path, draw: random.Random, monkeypatch: Any
) -> None:
    store, made = opened(tmp_path, 10), samples(draw, 10, SIZE)
    real, calls = os.write, iter(range(1000))

    def short(fd: int, data: memoryview) -> int:
        if next(calls) % 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(fd, data[: len(data) // 2])

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", short)
        for _ in range(20):
            assert put(store, made[0]) == [False]
    assert list(store.names()) == []
    assert put(store, *made) == [True] * 10
    assert there(store, made) == [True] * 10


def test_other_trouble_is_the_store_that_fails(tmp_path: Path, draw: random.Random, monkeypatch: Any) -> None:
    store, made = opened(tmp_path), sample(draw)
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", _failing(errno.EIO))
        with pytest.raises(StoreFailed, match=r"cannot write.*Input/output error"):
            put(store, made)
    assert put(store, made) == [True]
    for call, use in (("readv", lambda: got(store, made)), ("unlink", lambda: store.drop([made.name]))):
        with monkeypatch.context() as patch:
            patch.setattr(os, call, _failing(errno.EIO))
            with pytest.raises(StoreFailed, match="Input/output error"):
                use()
    assert got(store, made) == [made.data]


def test_reading_goes_on_where_nothing_can_be_written(tmp_path: Path, draw: random.Random, monkeypatch: Any) -> None:
    store, made = opened(tmp_path), sample(draw)
    put(store, made)
    monkeypatch.setattr(os, "utime", _failing(errno.EROFS))
    assert store.look([made.name]) == [True]
    assert got(store, made) == [made.data]
    assert put(store, made) == [True]


def test_a_file_size_limit_of_the_system_is_no_room(tmp_path: Path, draw: random.Random) -> None:
    store, small, large = opened(tmp_path), sample(draw, 1000), sample(draw, 1 << 20)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 19, hard))
    try:
        answers = put(store, small, large)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert answers == [True, False]
    assert got(store, small, large) == [small.data, None]


def test_a_disk_that_is_really_full_is_no_room(tmp_path: Path) -> None:
    """A tmpfs of one megabyte, in a mount namespace of our own."""
    script = "mount -t tmpfs -o size=1m none $1 && exec $2 -m tests.kv.full_disk $1"
    unshare = shutil.which("unshare")
    probe = [str(unshare), "-Urm", "sh", "-c", "mount -t tmpfs -o size=1m none $1", "sh", str(tmp_path)]
    if unshare is None or subprocess.run(probe, capture_output=True, check=False).returncode:
        pytest.skip("this system lets nobody mount a tmpfs of their own")
    done = _run([unshare, "-Urm", "sh", "-c", script, "sh", str(tmp_path), sys.executable])
    assert done == "full, read, freed, written"


def test_a_folder_that_is_removed_is_an_empty_store_and_works_again(tmp_path: Path, draw: random.Random) -> None:
    folder = tmp_path / "store"
    store, made = opened(folder, 10), samples(draw, 3, SIZE)
    put(store, *made)
    shutil.rmtree(folder)
    assert store.look([each.name for each in made]) == [False] * 3
    assert got(store, *made) == [None] * 3
    assert (list(store.names()), store.stat().objects, store.clear()) == ([], 0, 0)
    store.drop([made[0].name])
    assert put(store, *made) == [True] * 3
    assert got(store, *made) == [each.data for each in made]


def test_a_folder_that_is_moved_away_and_back_has_what_it_had(tmp_path: Path, draw: random.Random) -> None:
    folder = tmp_path / "store"
    store, made = opened(folder, 10), samples(draw, 2, SIZE)
    put(store, made[0])
    folder.rename(tmp_path / "away")
    assert got(store, made[0]) == [None]
    (tmp_path / "away").rename(folder)
    assert put(store, made[1]) == [True]
    assert got(store, *made) == [each.data for each in made]


def test_removing_the_folder_while_objects_are_written_spoils_none(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    store, stop = opened(folder, 50), threading.Event()

    def write() -> None:
        own = random.Random(1)
        while not stop.is_set():
            with contextlib.suppress(StoreFailed):
                put(store, sample(own, SIZE))

    thread = threading.Thread(target=write)
    thread.start()
    for _ in range(50):
        shutil.rmtree(folder, ignore_errors=True)
    stop.set()
    thread.join()
    last = sample(random.Random(2), SIZE)
    assert put(store, last) == [True]
    for path in folder.rglob("*"):
        if len(path.name) == 32:
            assert not isinstance(envelope.open_any(memoryview(path.read_bytes())), envelope.EnvelopeFlaw)


# ── writers that die ─────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("what", "times"), [("points", 0), ("moments", 60), ("crowd", 5)])
def test_writers_that_are_killed_leave_only_whole_objects(tmp_path: Path, what: str, times: int) -> None:
    """At every call to the system, at random moments, and several at once; see `tests.kv.killing`."""
    done = int(_run([sys.executable, "-m", "tests.kv.killing", what, str(tmp_path / "store"), str(times)]))
    assert done == times if times else done > 100


def test_a_draft_of_a_living_writer_is_left_alone(tmp_path: Path, draw: random.Random, monkeypatch: Any) -> None:
    store, made = opened(tmp_path), sample(draw)
    seen: list[Path] = []

    def look_around(fd: int, data: memoryview) -> int:
        seen.extend((tmp_path / ".writing").iterdir())
        open_store(f"file:{tmp_path}", timeout_s=10)
        assert all(path.exists() for path in seen)
        assert list(store.names()) == []
        return real(fd, data)

    real = os.write
    monkeypatch.setattr(os, "write", look_around)
    assert put(store, made) == [True]
    assert len(seen) == 1
    assert got(store, made) == [made.data]


def test_a_draft_of_a_dead_writer_is_swept_at_the_next_start(tmp_path: Path, draw: random.Random) -> None:
    store, made = opened(tmp_path), sample(draw)
    left = tmp_path / ".writing" / f"{made.key.hex()}.{'0' * 16}"
    left.write_bytes(made.data)
    assert got(store, made) == [None]
    assert list(store.names()) == []
    open_store(f"file:{tmp_path}", create=False)
    assert left.exists(), "who only looks does not tidy up"
    open_store(f"file:{tmp_path}")
    assert not left.exists()


def test_drafts_count_for_the_limit(tmp_path: Path, draw: random.Random, monkeypatch: Any) -> None:
    """Somebody who counts again while objects are being written counts those."""
    store, made = opened(tmp_path, 3), samples(draw, 4, SIZE)
    put(store, *made[:2])
    real = os.write
    begun: list[bool] = []

    def another_meanwhile(fd: int, data: memoryview) -> int:
        if not begun:
            begun.append(True)
            store.tidy()
            put(opened(tmp_path, 3), made[3])
        return real(fd, data)

    monkeypatch.setattr(os, "write", another_meanwhile)
    assert put(store, made[2]) == [True]
    assert there(store, made) == [True, False, True, True]


def test_a_process_that_stands_still_with_the_lock_is_a_failure_and_no_wait_for_ever(
    tmp_path: Path, draw: random.Random
) -> None:
    opened(tmp_path)
    store, made = FileStore(str(tmp_path), 0.05, None), samples(draw, 2)
    put(store, made[0])
    with FileLock(str(tmp_path / ".ledger")).held(time.monotonic() + 10):
        with pytest.raises(StoreFailed, match="another process holds its lock"):
            put(store, made[1])
        assert got(store, made[0]) == [made[0].data]
        open_store(f"file:{tmp_path}", timeout_s=0.05)
    assert put(store, made[1]) == [True]


def test_while_somebody_else_makes_room_there_is_none(tmp_path: Path, draw: random.Random) -> None:
    opened(tmp_path)
    store, made = FileStore(str(tmp_path), 0.05, WHOLE), samples(draw, 2, SIZE)
    put(store, made[0])
    with FileLock(str(tmp_path / ".evicting")).held(time.monotonic() + 10):
        assert put(store, made[1]) == [False]
    assert put(store, made[1]) == [True]


# ── damage ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_damaged_files_are_never_taken_for_good(tmp_path: Path) -> None:
    """`python -m tests.kv.harm --count 100000` does more of it."""
    made = harmed(tmp_path, 3000, seed=1)
    assert set(made.harms) == set(HARMS)
    assert set(made.outcomes) == {*map(str, envelope.EnvelopeFlaw), "missing", "oversized", "sound"}


def test_that_test_would_notice_a_checksum_that_checks_nothing(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(envelope, "_check", lambda whole: bytes(whole[48:64]))
    with pytest.raises(ServedBad):
        harmed(tmp_path, 500, seed=1)


def test_an_object_of_the_wrong_size_is_written_again(tmp_path: Path, draw: random.Random) -> None:
    """As a power cut leaves it: nobody needs to have read it before it is put right."""
    store, made = opened(tmp_path), sample(draw)
    put(store, made)
    os.truncate(path_of(tmp_path, made), 0)
    assert put(store, made) == [True]
    assert got(store, made) == [made.data]


@pytest.mark.parametrize("odd", ["symlink", "pipe", "folder"])
def test_what_is_no_file_is_no_object(tmp_path: Path, draw: random.Random, odd: str) -> None:
    store, made, other = opened(tmp_path), *samples(draw, 2)
    put(store, made, other)
    path = path_of(tmp_path, made)
    path.unlink()
    match odd:
        case "symlink":
            path.symlink_to(path_of(tmp_path, other))
        case "pipe":
            os.mkfifo(path)
        case _:
            path.mkdir()
    assert store.look([made.name]) == [False]
    assert got(store, made, other) == [None, other.data]
    assert [name for name, _ in store.names()] == [other.name]


# ── opening ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _link_to_itself(path: Path) -> None:
    path.symlink_to(path)


@pytest.mark.parametrize(
    ("prepare", "says"),
    [
        (lambda path: path.write_bytes(b""), "is a file, not a folder"),
        (lambda path: path.symlink_to("nowhere"), "is a link to nothing"),
        (_link_to_itself, "Too many levels of symbolic links"),
        (os.mkfifo, "is a file, not a folder"),
    ],
)
def test_what_cannot_be_a_store_is_said_at_the_start(tmp_path: Path, prepare: Callable[[Path], None], says: str) -> None:
    prepare(tmp_path / "store")
    for create in (True, False):
        with pytest.raises(BadStore, match=says):
            open_store(f"file:{tmp_path / 'store'}", create=create)


@pytest.mark.parametrize(
    ("prepare", "says"),
    [
        (lambda path: (path / ".writing").symlink_to(path), "is a link"),
        (lambda path: (path / ".writing").write_bytes(b""), "File exists"),
        (lambda path: (path / ".ledger").symlink_to(path / "elsewhere"), "Too many levels"),
        (lambda path: (path / ".ledger").mkdir(), "Is a directory"),
    ],
)
def test_what_stands_in_the_way_inside_is_said_at_the_start(
    tmp_path: Path, prepare: Callable[[Path], None], says: str
) -> None:
    prepare(tmp_path)
    with pytest.raises(BadStore, match=says):
        open_store(f"file:{tmp_path}")


@pytest.fixture
def nobody() -> Iterator[Path]:
    """A folder that others may reach, for a while as a user without rights."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    was = os.geteuid()
    if was == 0:
        os.seteuid(65534)
    yield folder
    os.seteuid(was)
    shutil.rmtree(folder)


def test_a_folder_without_permission_is_said_at_the_start(nobody: Path) -> None:
    nobody.chmod(0o555) if os.geteuid() != 65534 else None
    with pytest.raises(BadStore, match="Permission denied"):
        open_store(f"file:{nobody}")
    with pytest.raises(BadStore, match="Permission denied"):
        open_store(f"file:{nobody / 'below'}")


@pytest.mark.parametrize(
    ("call", "number", "says"),
    [("mkdir", errno.EROFS, "Read-only file system"), ("flock", errno.ENOLCK, "no locks")],
)
def test_a_file_system_that_will_not_do_is_said_at_the_start(
    tmp_path: Path, monkeypatch: Any, call: str, number: int, says: str
) -> None:
    monkeypatch.setattr("fcntl.flock" if call == "flock" else f"os.{call}", _failing(number))
    with pytest.raises(BadStore, match=says):
        open_store(f"file:{tmp_path}")


def test_a_full_disk_is_no_reason_not_to_start(tmp_path: Path, draw: random.Random, monkeypatch: Any) -> None:
    made = sample(draw)
    put(opened(tmp_path), made)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", _failing(errno.ENOSPC))
        store = open_store(f"file:{tmp_path}")
        assert got(store, made) == [made.data]
        assert put(store, sample(draw)) == [False]


def test_a_folder_that_cannot_be_made_says_why() -> None:
    with pytest.raises(BadStore, match="the folder /proc/nope/kv cannot be made: No such file or directory"):
        open_store("file:/proc/nope/kv")


def test_who_only_looks_makes_nothing(tmp_path: Path) -> None:
    with pytest.raises(BadStore, match="there is no store at"):
        open_store(f"file:{tmp_path / 'none'}", create=False)
    store = open_store(f"file:{tmp_path}", create=False)
    assert (store.stat().objects, list(store.names()), store.clear()) == (0, [], 0)
    assert list(tmp_path.iterdir()) == []


def test_folders_are_made_private(tmp_path: Path) -> None:
    open_store(f"file:{tmp_path}/a/b")
    assert stat.S_IMODE((tmp_path / "a" / "b").stat().st_mode) == 0o700


def test_a_relative_folder_stays_where_it_was(tmp_path: Path, draw: random.Random, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    store, made = open_store("file:here"), sample(draw)
    monkeypatch.chdir("/")
    put(store, made)
    assert path_of(tmp_path / "here", made).exists()


def test_a_home_folder_may_be_written_short(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert open_store("file:~/kv").stat().details["folder"] == str(tmp_path / "kv")


# ── addresses ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_addresses_are_taken_apart() -> None:
    assert parse_url("file:/a b?limit=20G").path == "/a b"
    assert parse_url("file:/a?limit=20G").limit_bytes == 20 << 30
    assert parse_url("file:///a").path == "/a"
    assert parse_url("file:a/b").path == "a/b"
    far = parse_url("redis://me:s%40cret@[::1]:6380/3?limit=1K&x=y")
    assert (far.kind, far.host, far.port, far.path) == ("valkey", "::1", 6380, "3")
    assert (far.user, far.password, dict(far.options), far.limit_bytes) == ("me", "s@cret", {"x": "y"}, 1024)
    assert "cret" not in str(far) + repr(far)
    assert str(far) == "valkey://[::1]:6380/3"
    assert str(parse_url("mooncake://host:1")) == "mooncake://host:1"


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("", "not the address of a store"), ("/a", "not the address of a store"), ("s3://b", "not the address of a store"),
        ("file:", "names no folder"), ("file:?limit=1G", "names no folder"), ("file://host/a", "names a host"),
        ("file:/a?limit=much", "'much' is not"), ("file:/a?limit", "not name=value"), ("file:/a?x=1", "no option 'x'"),
        ("file:/a?limit=1&limit=2", "twice"), ("file:/a?limit=0", "holds nothing"), ("file:/a\0b", "null byte"),
        ("valkey:host", "names no host"), ("valkey://", "names no host"), ("valkey://h:port", "not the address of a store"),
        ("valkey://h:99999", "not the address of a store"), ("valkey://me:secret@h:port", "^valkey://h:port is"),
    ],
)  # fmt: skip
def test_addresses_that_are_none_are_told(url: str, says: str) -> None:
    with pytest.raises(BadStore, match=says):
        open_store(url)


def test_a_limit_given_beside_the_address_goes_before_it(tmp_path: Path) -> None:
    assert open_store(f"file:{tmp_path}?limit=5K").stat().limit_bytes == 5120
    assert open_store(f"file:{tmp_path}?limit=5K", limit_bytes=7).stat().limit_bytes == 7


def test_a_library_that_is_not_here_is_named(monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "baton.kv.mooncake_store", None)
    with pytest.raises(BadStore, match=r"a mooncake store needs a library .*baton-serve\[mooncake\]"):
        open_store("mooncake://127.0.0.1:1")


def test_sizes_are_read() -> None:
    assert [parse_size(text) for text in ("17", "2k", "1.5M", "3 GiB", "1tb")] == [17, 2048, 3 << 19, 3 << 30, 1 << 40]


def _failing(number: int) -> Callable[..., Any]:
    def fail(*_: object, **__: object) -> Any:
        raise OSError(number, os.strerror(number))

    return fail


def _run(command: Sequence[str]) -> str:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(file_store.__file__).parents[2]), str(ROOT)])}
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=environment, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


def test_a_store_without_a_limit_has_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"file:{tmp_path}/store"
    assert open_store(url).stat().limit_bytes == file_store.DEFAULT_LIMIT_BYTES == 10 << 30
    assert open_store(f"{url}?limit=1G").stat().limit_bytes == 1 << 30
    assert open_store(url, limit_bytes=5).stat().limit_bytes == 5
    assert open_store(url, create=False).stat().limit_bytes is None, "who only looks does not know the writers' limit"
    monkeypatch.setattr(file_store, "DEFAULT_LIMIT_BYTES", 1000)
    store = open_store(url)
    names = [f"{0:016x}/{number:032x}" for number in range(20)]
    for name in names:
        store.put([name], [memoryview(bytes(300))])
    assert 0 < store.stat().bytes <= 1000
