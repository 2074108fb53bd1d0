"""Recordings: they replay to the same decisions, without the secret and with other token ids; they say what differs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from baton.cli.main import app
from baton.core.config import ReservePolicy, WorkerConfig
from baton.core.content_hashes import ContentHashes
from baton.core.engine.gauges import DraftGauges, SchedulerGauges
from baton.core.engine.records import Settled
from baton.core.engine.request import RequestId, Sampling, Submission, frozen_tokens
from baton.core.engine.worker import Worker
from baton.core.errors import InvariantViolated
from baton.executor.scripted import ScriptedExecutor
from baton.sim import instance, router_host
from baton.sim.fuzzed_run import run_seed
from baton.wire import watched_sessions, watched_worker
from baton.wire.engine_messages import WireError, step_output
from baton.wire.flight_recorder import CALL_BYTES, SNAPSHOTS, FlightRecorder, Raised
from baton.wire.recording_file import BadRecording, Recording, RecordingHeader, write_recording
from baton.wire.recording_mask import TOKEN_IDS, Mark, RecordingMask
from baton.wire.replaying import Replay, ReplayedCall
from baton.wire.router_sessions import RouterSessions
from baton.wire.snapshot import Kind
from baton.wire.watched_sessions import WatchedSessions
from baton.wire.watched_worker import WatchedWorker
from tests.laws.test_preemption_laws import CROWDED, Machine
from tests.sim.planted import BUGS
from tests.support import routed
from tests.support.driver import VOCABULARY, Driver, shape_of


def header(of: str = "engine", version: str = "1", masked: bool = True) -> RecordingHeader:
    return RecordingHeader(version, of, "a", "a test", "now", masked)


def file_of(recorder: FlightRecorder, of: str = "engine", masked: bool = True) -> bytes:
    mask = RecordingMask(b"a key of this recording") if masked else None
    return write_recording(header(of), recorder.segments(), mask)


def differences(data: bytes, with_laws: bool = False) -> list[ReplayedCall]:
    return [call for call in Replay(Recording(data), with_laws).steps() if call.difference is not None]


def recorded(driver: Driver, segment_bytes: int = 1 << 30) -> FlightRecorder:
    """Everything that this driver hands in from now on."""
    worker = driver.worker
    recorder = FlightRecorder(worker, worker.hashes, watched_worker.weight_of, segment_bytes)
    driver._driver._worker = WatchedWorker(worker, recorder)
    return recorder


# ── whole worlds ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("seed", range(6))
def test_whole_worlds_replay_to_the_same_decisions(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[str, FlightRecorder]] = []

    def record(name: str, watched: object, hashes: ContentHashes) -> FlightRecorder:
        is_router = isinstance(watched, RouterSessions)
        weight_of = (watched_sessions if is_router else watched_worker).weight_of
        made.append(("router" if is_router else "engine", FlightRecorder(watched, hashes, weight_of, 300 * CALL_BYTES)))
        return made[-1][1]

    for host in (instance, router_host):
        monkeypatch.setattr(host, "TwinCheck", record)
        monkeypatch.setattr(host, "has_twins", lambda _seed: True)
    assert run_seed(seed).broken is None
    assert made
    for of, recorder in made:
        for masked in (True, False):
            assert not [(call.number, call.difference) for call in differences(file_of(recorder, of, masked))]


# ── what a recording shows ───────────────────────────────────────────────────────────────────────────────────────────────

FIRST_REAL, REAL_END = 1_234_567, 1 << 24
"""Token ids that occur as nothing else."""


def integers_of(value: Any) -> Iterator[int]:
    match value:
        case [Kind.ARRAY, str(dtype), _, bytes(data), _] if dtype[1] in "iu":
            yield from np.frombuffer(data, dtype=dtype).tolist()
        case list() | tuple():
            for item in value:
                yield from integers_of(item)
        case bytes():
            try:
                inner = msgspec.msgpack.decode(value)
            except ValueError:
                inner = None
            if isinstance(inner, list):
                yield from integers_of(inner)
            elif len(value) % 4 == 0:
                yield from np.frombuffer(value, dtype="<i4").tolist()
        case int():
            yield value


def shown(data: bytes) -> tuple[set[int], bytes]:
    """All integers and all bytes of a recording."""
    frames = list(Recording(data).frames())
    return set(integers_of(msgspec.to_builtins(frames, builtin_types=(bytes,)))), msgspec.msgpack.encode(frames)


def submission(number: int, draws: np.random.Generator, **fields: Any) -> Submission:
    prompt = np.concatenate([np.arange(FIRST_REAL, FIRST_REAL + 12), draws.integers(FIRST_REAL, REAL_END, 3 + number % 7)])
    stop = tuple(draws.integers(FIRST_REAL, REAL_END, 2).tolist())
    sampling = Sampling(number, stop_token_ids=stop, logit_bias=((FIRST_REAL + number, 1.5),), logprobs=2)
    return Submission(RequestId(f"r{number}"), frozen_tokens(prompt), sampling, 20, salt=b"salt of a tenant", **fields)


class FewStops(ScriptedExecutor):
    """Ids of the range that is looked for."""

    def collect(self) -> Any:
        result = super().collect()
        tokens = FIRST_REAL + result.tokens % (REAL_END - FIRST_REAL)
        return msgspec.structs.replace(result, tokens=tokens.astype(np.int32))


def test_an_engines_recording_has_no_real_token_id_salt_or_secret_unless_asked_for() -> None:
    config = WorkerConfig(slots=4, blocks=40, block_size=4, context_tokens=64, step_tokens=32, reserve=ReservePolicy.NONE)
    driver, draws = Driver(config, FewStops(shape_of(config), REAL_END)), np.random.default_rng(1)
    recorder = recorded(driver, 40 * CALL_BYTES)
    for number in range(30):
        driver.submit(submission(number, draws))
        for _ in range(number % 9):
            driver.tick()
            driver.settle_one()
    assert len(recorder.segments()) == 2
    real = {token for tokens in driver.outputs.values() for token in tokens}
    integers, everything = shown(file_of(recorder))
    assert not {number for number in integers if FIRST_REAL <= number < REAL_END} & (real | {FIRST_REAL, FIRST_REAL + 1})
    for key in driver.worker.scheduler.pool.prefix.names().values():
        assert key not in everything
    assert b"salt of a tenant" not in everything
    integers, everything = shown(file_of(recorder, masked=False))
    assert len(real & integers) > 10, "the test would see them"
    assert b"salt of a tenant" in everything


def test_kv_events_are_in_a_recording_and_their_tokens_are_masked() -> None:
    config = WorkerConfig(slots=4, blocks=24, block_size=4, context_tokens=48, step_tokens=32, kv_events=True)
    driver, draws = Driver(config, FewStops(shape_of(config), REAL_END)), np.random.default_rng(1)
    recorder = recorded(driver, 40 * CALL_BYTES)
    watched, told = WatchedWorker(driver.worker, recorder), 0
    for number in range(20):
        driver.submit(submission(number, draws))
        driver.run()
        told += len(watched.block_events().stored)
    assert told > 40
    for masked in (True, False):
        assert not differences(file_of(recorder, masked=masked), with_laws=True)
    integers, everything = shown(file_of(recorder))
    assert not integers & set(range(FIRST_REAL, FIRST_REAL + 12))
    assert np.arange(FIRST_REAL, FIRST_REAL + 4, dtype="<i4").tobytes() not in everything
    assert np.arange(FIRST_REAL, FIRST_REAL + 4, dtype="<i4").tobytes() in shown(file_of(recorder, masked=False))[1]


def test_a_routers_recording_has_no_real_token_id_prompt_or_tenant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routed, "VOCABULARY", REAL_END)
    world, draws = routed.World(members=2), np.random.default_rng(1)
    sessions = world.sessions
    recorder = FlightRecorder(sessions, sessions.router.hashes, watched_sessions.weight_of)
    world.sessions = WatchedSessions(sessions, recorder)  # type: ignore[assignment]
    world.run()
    asked = [world.ask([submission(number, draws)], origin=b"the prompt of a client, %d" % number) for number in range(8)]
    world.run()
    real = {token for one in asked for tokens in one.tokens for token in tokens if token >= FIRST_REAL}
    data = file_of(recorder, "router")
    assert not differences(data)
    integers, everything = shown(data)
    assert len(real) > 10
    assert not integers & (real | {FIRST_REAL, FIRST_REAL + 1})
    for secret in (b"the prompt of a client", b"salt of a tenant", b"tenant\xa5", routed.SECRET):
        assert secret not in everything.replace(b"tenant-", b"")
    assert len(real & shown(file_of(recorder, "router", masked=False))[0]) > 10, "the test would see them"


@given(st.lists(st.integers(0, TOKEN_IDS - 1), unique=True), st.binary(min_size=1))
def test_tokens_are_permuted(ids: list[int], key: bytes) -> None:
    masked = RecordingMask(key).tokens(np.array(ids, dtype=np.int32)).tolist()
    assert len(set(masked)) == len(ids)
    assert all(0 <= token < TOKEN_IDS for token in masked)


def test_recordings_permute_differently_and_leave_what_is_no_id() -> None:
    ids = np.arange(1000, dtype=np.int32)
    one, other = (RecordingMask(key).tokens(ids) for key in (b"1", b"2"))
    assert np.count_nonzero(one == other) < 5
    assert np.count_nonzero(one == ids) < 5
    outside = np.array([-1, TOKEN_IDS, (1 << 31) - 1], dtype=np.int32)
    np.testing.assert_array_equal(RecordingMask(b"1").tokens(outside), outside)


@given(st.lists(st.integers(0, (1 << 31) - 1), unique=True), st.integers(2, TOKEN_IDS - 1))
def test_what_is_no_id_of_the_vocabulary_is_none_afterwards(ids: list[int], vocabulary: int) -> None:
    mask = RecordingMask(b"key")
    shown_vocabulary = mask.scalar(vocabulary, Mark.VOCABULARY)
    assert mask.scalar(vocabulary - 1, Mark.VOCABULARY) == shown_vocabulary - 1, "of an instance that does not fit"
    known = [number for number in ids if number < vocabulary]
    strange = [number for number in ids if vocabulary <= number < TOKEN_IDS]
    masked = mask.tokens(np.array(known, dtype=np.int32))
    assert len(set(masked.tolist())) == len(known)
    assert (masked < shown_vocabulary).all()
    assert (masked >= 0).all()
    assert (mask.tokens(np.array(strange, dtype=np.int32)) >= shown_vocabulary).all()


@pytest.mark.parametrize("masked", [True, False])
def test_a_token_that_the_model_does_not_have_replays(masked: bool) -> None:
    world = routed.World(members=2)
    sessions = world.sessions
    recorder = FlightRecorder(sessions, sessions.router.hashes, watched_sessions.weight_of)
    world.sessions = watched = WatchedSessions(sessions, recorder)  # type: ignore[assignment]
    world.run()
    world.ask([Submission(RequestId("r"), frozen_tokens([1, 2, 3]), Sampling(1), 20)])
    while not any(member.sessions.open_requests for member in world.members):
        world.turn()
    session = next(number for number, one in sessions._sessions.items() if one.running)
    serial = next(iter(sessions._sessions[session].running))
    settled = Settled(np.array([serial]), np.array([1], np.int32), frozen_tokens([VOCABULARY]), (), (), ())
    with pytest.raises(WireError, match="not in the vocabulary"):
        watched.receive(session, step_output(settled, SchedulerGauges(), DraftGauges()), world.now_us)
    steps = list(Replay(Recording(file_of(recorder, "router", masked))).steps())
    assert not [call.difference for call in steps if call.difference]
    assert steps[-1].result == Raised("WireError", "a token that is not in the vocabulary")


@pytest.mark.parametrize("masked", [True, False])
def test_a_refused_continuation_replays(masked: bool) -> None:
    driver = Driver(WorkerConfig(slots=2, blocks=8, block_size=4, context_tokens=64, step_tokens=32))
    recorder = recorded(driver)
    ended = Sampling(1, stop_token_ids=(FIRST_REAL,))
    assert not driver.submit(Submission(RequestId("r"), frozen_tokens([1]), ended, 9, generated=frozen_tokens([FIRST_REAL])))
    data = file_of(recorder, masked=masked)
    (call,) = Replay(Recording(data)).steps()
    assert call.difference is None
    assert "ends with a stop token" in repr(call.result)


class Odd(Exception):
    """Of no class that anybody lists."""


def test_whatever_a_call_raises_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(CROWDED)
    recorder = recorded(driver)
    with monkeypatch.context() as patch:
        patch.setattr(Worker, "changes", _raise_odd)
        with pytest.raises(Odd):
            WatchedWorker(driver.worker, recorder).changes(5)
        assert not differences(file_of(recorder))
    (differs,) = differences(file_of(recorder))
    assert "Odd" in str(differs.difference)


def _raise_odd(_worker: Worker, now_us: int) -> None:
    raise Odd(f"at {now_us}")


# ── segments ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def crowd(seed: int = 3, bodies: int = 20) -> Machine:
    machine = Machine(CROWDED, seed, Counter())
    machine.bodies = 24 - bodies
    return machine


def drive(machine: Machine) -> None:
    while machine.bodies < 24:
        machine.event(machine.draws.random())
    machine.driver.run()


def test_two_segments_are_kept_and_the_size_is_bounded() -> None:
    machine = crowd()
    recorder = recorded(machine.driver, 50 * CALL_BYTES)
    opened: list[int] = []
    recorder.on_open = lambda segment: opened.append(len(segment.calls))
    drive(machine)
    assert len(opened) > 2
    older, newer = recorder.segments()
    for segment in (older, newer):
        assert len(segment.calls) <= 1 + max(50, SNAPSHOTS * segment.state.estimated_bytes / CALL_BYTES)
    assert not differences(file_of(recorder))


def test_the_state_that_is_reached_is_compared_with_the_next_snapshot() -> None:
    machine = crowd()
    recorder = recorded(machine.driver, 50 * CALL_BYTES)
    drive(machine)
    older, _newer = recorder.segments()
    older.calls.pop()
    (differs, *_) = differences(file_of(recorder))
    assert differs.method == "snapshot"


def test_deciding_goes_on_where_no_snapshot_can_be_taken() -> None:
    machine = crowd()
    recorder = recorded(machine.driver, 50 * CALL_BYTES)
    machine.driver.worker.__dict__["stranger"] = object()
    drive(machine)
    machine.check()
    assert recorder.stopped is not None
    del machine.driver.worker.__dict__["stranger"]
    assert not differences(file_of(recorder)), "what was recorded before is still there"


# ── a bug, found from its recording alone ────────────────────────────────────────────────────────────────────────────────


def broken_run() -> tuple[FlightRecorder, InvariantViolated]:
    """Loads with a planted bug until an engine's own check finds it."""
    for seed in range(200):
        machine = crowd(seed)
        machine.driver.audited = False
        recorder = recorded(machine.driver)
        try:
            drive(machine)
        except InvariantViolated as error:
            return recorder, error
        except RuntimeError:
            continue
    raise LookupError("no load finds it")


BUG = "free_blocks_at_the_order"


def test_a_planted_bug_is_found_from_its_recording_alone(tmp_path: Path) -> None:
    file = tmp_path / "engine.baton"
    with BUGS[BUG].planted():
        recorder, error = broken_run()
        calls = len(recorder.newer.calls)
        file.write_bytes(file_of(recorder))
        # With the bug: the same call raises the same error, and the laws show where it began.
        seen = list(Replay(Recording(file.read_bytes()), with_laws=False).steps())
        assert [call for call in seen if call.difference is not None] == []
        assert len(seen) == calls
        assert str(error) in str(seen[-1].result)
        first = differences(file.read_bytes(), with_laws=True)[0]
        assert "breaks an invariant" in str(first.difference)
        assert first.number <= calls
    # Without it: the decision that was wrong comes out otherwise, before anything breaks.
    mended = differences(file.read_bytes())[0]
    assert "the recording has" in str(mended.difference)
    assert mended.number <= first.number
    shown = CliRunner().invoke(app, ["replay", str(file)])
    assert shown.exit_code == 1
    assert f"{mended.number:7}" in shown.output
    assert "^ differs: the recording has" in shown.output


# ── files ────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def some_file() -> bytes:
    machine = crowd(bodies=6)
    recorder = recorded(machine.driver)
    drive(machine)
    return file_of(recorder)


def test_a_file_that_was_cut_off_replays_up_to_there() -> None:
    data = some_file()
    whole, recording = len(list(Replay(Recording(data)).steps())), Recording(data[: len(data) * 3 // 4])
    calls = list(Replay(recording).steps())
    assert recording.is_cut
    assert 0 <= len(calls) < whole
    assert not [call for call in calls if call.difference]


@pytest.mark.parametrize("spoil", [lambda data: b"", lambda data: b"x" + data, lambda data: data[:40] + b"\0\0" + data[42:]])
def test_what_is_no_recording_or_damaged_is_refused(spoil: Callable[[bytes], bytes], tmp_path: Path) -> None:
    file = tmp_path / "spoiled"
    file.write_bytes(spoil(some_file()))
    with pytest.raises(BadRecording):
        list(Replay(Recording(file.read_bytes())).steps())
    assert CliRunner().invoke(app, ["replay", str(file)]).exit_code == 2


def test_the_command_tells_the_story_and_names_another_version(tmp_path: Path) -> None:
    file = tmp_path / "engine.baton"
    file.write_bytes(some_file())
    done = CliRunner().invoke(app, ["replay", str(file)])
    assert done.exit_code == 0, done.output
    assert "by Baton 1" in done.output
    assert "its decisions may differ" in done.output
    assert "Submit 1: 18/0" in done.output
    assert "all as recorded" in done.output
    part = CliRunner().invoke(app, ["replay", str(file), "--from", "3", "--to", "4"])
    assert len(part.output.splitlines()) == 5
    quiet = CliRunner().invoke(app, ["replay", str(file), "--quiet"])
    assert len(quiet.output.splitlines()) == 3
    one = CliRunner().invoke(app, ["replay", str(file), "--request", "19/0"])
    assert 3 < len(one.output.splitlines()) < len(done.output.splitlines())
    assert "19/0" in one.output
    assert "18/0" not in one.output
