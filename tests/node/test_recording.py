"""Files of the flight recorder: when they are written, how many there are, and that they replay."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.core.config import WorkerConfig
from baton.core.engine.orders import Cancel
from baton.core.engine.plan import NO_INT32S, NO_INT64S, StepResult
from baton.core.engine.worker import StepDone
from baton.core.errors import InvariantViolated
from baton.node import recording
from baton.node.recording import CannotRecord, ProcessRecorder, dump_on_signal, open_recorder
from baton.node.settings import RecordSettings
from baton.wire.flight_recorder import CALL_BYTES, FlightRecorder
from baton.wire.recording_file import Recording
from baton.wire.replaying import Replay
from baton.wire.watched_worker import WatchedWorker, weight_of
from tests.support.driver import Driver, submission

CONFIG = WorkerConfig(slots=4, blocks=48, block_size=4, context_tokens=64, step_tokens=32, waiting_max=64)


@pytest.fixture(autouse=True)
def close_all() -> Iterator[None]:
    yield
    recording.close_recorders()
    recording._open.clear()


def recorded(settings: RecordSettings) -> tuple[Driver, ProcessRecorder]:
    driver = Driver(CONFIG)
    recorder = open_recorder("engine", "d1", driver.worker, driver.worker.hashes, weight_of, settings)
    assert recorder is not None
    driver._driver._worker = WatchedWorker(driver.worker, recorder.watch)
    return driver, recorder


def load(driver: Driver, requests: int = 6) -> None:
    for number in range(requests):
        driver.submit(submission(range(number, number + 9), 12, name=f"r{number}"))
    driver.run()


def calls_of(path: Path) -> int:
    calls = list(Replay(Recording(path.read_bytes())).steps())
    assert not [call for call in calls if call.difference]
    return len(calls)


def test_an_invariant_violation_writes_the_last_decisions(tmp_path: Path) -> None:
    driver, _ = recorded(RecordSettings(record_folder=str(tmp_path)))
    load(driver)
    alien = StepResult(7, NO_INT32S, NO_INT64S, NO_INT32S.astype("int8"), NO_INT32S, NO_INT32S, NO_INT64S)
    with pytest.raises((InvariantViolated, IndexError)):
        driver.send(StepDone(alien))
    (path,) = tmp_path.iterdir()
    assert path.stat().st_mode & 0o077 == 0, "nobody else reads it"
    *before, last = Replay(Recording(path.read_bytes()), with_laws=False).steps()
    assert len(before) > 20
    assert last.difference is None
    assert "Raised" in repr(last.result)


def test_orders_write_numbered_files_and_the_oldest_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "KEPT_FILES", 3)
    driver, recorder = recorded(RecordSettings(record_folder=str(tmp_path)))
    load(driver)
    paths = [recorder.dump("by order") for _ in range(5)]
    assert len(set(paths[:4])) == 4
    assert sorted(tmp_path.iterdir()) == sorted(path for path in paths[-3:] if path is not None)
    assert calls_of(tmp_path / "engine-d1.4.baton") > 20


def test_all_decisions_are_in_the_file_of_record(tmp_path: Path) -> None:
    driver, recorder = recorded(RecordSettings(record=str(tmp_path / "all.baton")))
    load(driver)
    made = len(recorder.watch.newer.calls)
    recorder.close()
    assert calls_of(tmp_path / "all.baton") == made
    driver, recorder = recorded(RecordSettings(record=f"{tmp_path}/all.baton"))
    recorder.close()
    assert (tmp_path / "all.2.baton").exists(), "and the first is kept"


def test_segments_that_cannot_be_written_in_time_are_left_out_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording, "LAGGING_SEGMENTS", 2)
    monkeypatch.setattr(recording, "FLUSH_S", 1000.0)
    monkeypatch.setattr(recording, "FlightRecorder", lambda *parts: FlightRecorder(*parts, 20 * CALL_BYTES))
    driver, recorder = recorded(RecordSettings(record=str(tmp_path / "all.baton")))
    load(driver, 120)
    recorder.close()
    replay = Replay(Recording((tmp_path / "all.baton").read_bytes()))
    assert not [call for call in replay.steps() if call.difference]
    assert replay.left_out > 0


def test_a_signal_writes_them(tmp_path: Path) -> None:
    driver, recorder = recorded(RecordSettings(record_folder=str(tmp_path)))
    load(driver)
    before = signal.getsignal(recording.DUMP_SIGNAL)
    try:
        dump_on_signal(recorder)
        os.kill(os.getpid(), recording.DUMP_SIGNAL)
        deadline_s = time.monotonic() + 30
        while not list(tmp_path.iterdir()) and time.monotonic() < deadline_s:
            driver.send(Cancel(10_000))
        recorder.dump("and by order")  # waits for the one that is being written
    finally:
        signal.set_wakeup_fd(-1)
        signal.signal(recording.DUMP_SIGNAL, before)
    assert Recording((tmp_path / "engine-d1.baton").read_bytes()).header.reason == "SIGUSR1"


def test_it_can_be_switched_off_and_a_file_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    worker = Driver(CONFIG).worker
    off = RecordSettings(flight_recorder=False)
    assert open_recorder("engine", "", worker, worker.hashes, weight_of, off) is None
    settings = RecordSettings(record=str(tmp_path / "no-such-folder" / "file"))
    with pytest.raises(CannotRecord, match="no-such-folder"):
        open_recorder("engine", "", worker, worker.hashes, weight_of, settings)


def test_a_folder_that_cannot_be_written_ends_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    driver, recorder = recorded(RecordSettings(record_folder=str(tmp_path / "file")))
    load(driver)
    assert recorder.dump("by order") is None
    assert "cannot be written" in caplog.text


STUCK = """
import ctypes, sys
from baton.node.recording import dump_on_signal
from baton.node.settings import RecordSettings
from pathlib import Path
from tests.node.test_recording import load, recorded

driver, recorder = recorded(RecordSettings(record_folder=sys.argv[1]))
load(driver)
dump_on_signal(recorder, Path(sys.argv[1]) / "dumped")
mutex = ctypes.create_string_buffer(64)
print("stuck", flush=True)
ctypes.CDLL(None).pthread_mutex_lock(mutex)
ctypes.CDLL(None).pthread_mutex_lock(mutex)
"""


def test_a_process_whose_main_thread_is_stuck_in_c_code_still_writes_them(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", STUCK, str(tmp_path)], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"stuck\n"
            process.send_signal(recording.DUMP_SIGNAL)
            deadline_s = time.monotonic() + 30
            while not (tmp_path / "dumped").exists() and time.monotonic() < deadline_s:
                time.sleep(0.01)
        finally:
            process.kill()
    assert calls_of(tmp_path / "engine-d1.baton") > 20


def test_the_end_of_a_process_waits_for_a_file_that_is_being_written(tmp_path: Path) -> None:
    driver, recorder = recorded(RecordSettings(record_folder=str(tmp_path)))
    load(driver)
    recorder.dump_soon("by order")
    while not recorder._dumping.locked() and not list(tmp_path.iterdir()):
        pass
    recorder.close()
    assert calls_of(tmp_path / "engine-d1.baton") > 20
