"""A fleet of stand-ins: which processes are started, restarted, given up and stopped, and in which order."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from baton.core.errors import EXIT_SETUP
from baton.node.stage_progress import StageProgress
from baton.node.start_stages import StartStages
from baton.up import health_watch
from baton.up import supervisor as supervisor_module
from baton.up.fleet_plan import FleetPlan, PlannedProcess, RouterPorts
from baton.up.merged_log import MergedLog
from baton.up.restarts import FAILED_STARTS_MAX
from baton.up.supervisor import EXIT_AT_ONCE, EXIT_FAILED, ROUTER, Supervisor

WAIT_S = 20.0

ROUTER_STAND_IN = """
import json, signal, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
names, port, notes = sys.argv[1].split(","), int(sys.argv[2]), sys.argv[3]
class Answer(BaseHTTPRequestHandler):
    def do_GET(self):
        body = json.dumps({"data": [{"name": name, "state": "ready", "more": 1} for name in names]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *_): pass
def end(*_):
    open(notes, "a").write("router told\\n")
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
signal.signal(signal.SIGUSR1, lambda *_: open(notes, "a").write("router dumps\\n"))
server = HTTPServer(("127.0.0.1", port), Answer)
at = server.server_address[1]
print(f"m is served at http://127.0.0.1:{at}\\ninstances join at 127.0.0.1:{at}", flush=True)
server.serve_forever()
"""

MEMBER_STAND_IN = """
import signal, sys
name, notes, how = sys.argv[1:]
def end(*_):
    open(notes, "a").write(f"{name} told\\n")
    sys.exit(0)
signal.signal(signal.SIGTERM, signal.SIG_IGN if how == "deaf" else end)
signal.signal(signal.SIGUSR1, lambda *_: open(notes, "a").write(f"{name} dumps\\n"))
open(notes, "a").write(f"{name} started\\n")
if how == "broken":
    sys.exit("the disk is on fire")
if how == "refused":
    print("loading\\nbaton serve: the model is broken", flush=True)
    sys.exit(2)
if how == "usage":
    print("no such option", flush=True)
    sys.exit(2)
print("[  1.5 s] loading the weights\\nstarted in 2.0 s: loading 0.5 s", flush=True)
print("m is served at http://127.0.0.1:1\\ntalk to it with: nothing", flush=True)
while True:
    signal.pause()
"""


@dataclass(frozen=True, slots=True)
class StandIns(FleetPlan):
    """A fleet of small scripts in place of the real processes."""

    notes: Path = Path()
    how: dict[str, str] = field(default_factory=dict)

    def router_command(self, ports: RouterPorts) -> list[str]:
        names = ",".join(member.name for member in self.members)
        script = "import sys; sys.exit('no such port')" if self.how.get(ROUTER) == "broken" else ROUTER_STAND_IN
        return [sys.executable, "-S", "-c", script, names, str(ports.http), str(self.notes)]

    def member_command(self, member: PlannedProcess, join: str, cores: int) -> list[str]:
        how = self.how.get(member.name, "well")
        return [sys.executable, "-S", "-c", MEMBER_STAND_IN, member.name, str(self.notes), how]


@dataclass
class Running:
    supervisor: Supervisor
    log: io.StringIO
    notes: Path
    run: asyncio.Task[int]
    shown: ShownStages

    async def until(self, holds: Callable[[], bool], what: str) -> None:
        async with asyncio.timeout(WAIT_S):
            while not holds():
                assert not self.run.done() or holds(), f"it ended before: {what}\n{self.log.getvalue()}"
                await asyncio.sleep(0.01)

    async def code(self) -> int:
        async with asyncio.timeout(WAIT_S):
            return await self.run

    def started(self, name: str) -> int:
        return self.notes.read_text().split("\n").count(f"{name} started") if self.notes.exists() else 0

    def pids(self) -> list[int]:
        text = self.log.getvalue()
        return [int(part.split(",")[0].split(")")[0]) for part in text.split("(pid ")[1:]]


class ShownStages:
    """A view that keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def began(self, stage: str, at_s: float) -> None:
        self.told.append(stage)

    def advanced(self, progress: StageProgress) -> None:
        self.told.append(str(progress))

    def ended(self, stage: str, took_s: float) -> None:
        self.told.append("ended")

    def close(self) -> None:
        self.told.append("closed")


@asynccontextmanager
async def fleet(
    folder: Path,
    *,
    decode: int = 2,
    how: dict[str, str] | None = None,
    api_keys: tuple[str, ...] = (),
    admin_key: str | None = None,
    metrics_key: str | None = None,
) -> AsyncIterator[Running]:
    plan = StandIns(
        "m", decode=decode, router_port=0, notes=folder / "notes", how=how or {}, restart_delay_us_max=0,
        api_keys=api_keys, admin_key=admin_key, metrics_key=metrics_key,
    )  # fmt: skip
    out = io.StringIO()
    log = MergedLog((ROUTER, *(member.name for member in plan.members)), out, colours=False)
    shown = ShownStages()
    supervisor = Supervisor(plan, log, 2, StartStages(shown))
    running = Running(supervisor, out, plan.notes, asyncio.create_task(supervisor.run()), shown)
    try:
        yield running
    finally:
        supervisor.stop()
        supervisor.stop()
        await running.run
    assert not [pid for pid in running.pids() if _lives(pid)]


def _environment(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    return {name: value for name, _, value in (line.partition("=") for line in lines)}


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def test_the_signal_to_write_the_last_decisions_goes_on_to_all_processes(tmp_path: Path) -> None:
    async with fleet(tmp_path) as running:
        await running.until(lambda: "Dashboard" in running.log.getvalue(), "the banner")
        os.kill(os.getpid(), signal.SIGUSR1)
        dumps = {"router dumps", "decode-1 dumps", "decode-2 dumps"}
        await running.until(lambda: dumps <= set(running.notes.read_text().splitlines()), "all were told")
        assert len(running.pids()) == 3, "and nobody ended"


async def test_what_hangs_is_told_to_write_its_last_decisions_before_it_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor_module, "ASK_US", 50_000)
    monkeypatch.setattr(supervisor_module, "RECORDED_WITHIN_S", 0.5)
    monkeypatch.setattr(health_watch, "HUNG_US", 0)
    monkeypatch.setattr(health_watch, "HUNG_RUNNING_US", 0)
    async with fleet(tmp_path, decode=1) as running:  # nobody answers at the address that the instance names
        await running.until(lambda: "was ended by SIGKILL" in running.log.getvalue(), "it is killed")
        assert "decode-1 dumps" in running.notes.read_text().splitlines()
        assert "router dumps" not in running.notes.read_text().splitlines()


async def test_the_banner_comes_when_all_are_there_and_names_what_to_do_next(tmp_path: Path) -> None:
    async with fleet(tmp_path) as running:
        await running.until(lambda: "Dashboard" in running.log.getvalue(), "the banner")
        text = running.log.getvalue()
        assert "m is served by a router and 2 decode" in text
        assert f"{running.supervisor.url}/dashboard" in text
        assert "baton drain decode-1" in text
        assert "decode-1 │ ── [  1.5 s] loading the weights\n" in text
        assert text.count(", started in 2.0 s: loading 0.5 s\n") == 2, "of each instance, when it is ready"
        assert "talk to it with" not in text


async def test_keys_reach_all_by_the_environment_and_the_file_of_options_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATON_CONFIG", "a file with options of all")
    monkeypatch.setenv("BATON_KV_EVENTS_ENDPOINT", "tcp://127.0.0.1:5557")
    monkeypatch.setenv("BATON_API_KEY", "from outside")
    monkeypatch.setenv("BATON_KV_STORE", "file:/of/somebody")
    async with fleet(tmp_path, api_keys=("group:one", "two"), admin_key="three") as running:
        await running.until(lambda: "Dashboard" in running.log.getvalue(), "the banner")
        for pid in running.pids():
            variables = _environment(pid)
            assert (variables["BATON_API_KEY"], variables["BATON_ADMIN_KEY"]) == ("group:one two", "three")
            assert "BATON_CONFIG" not in variables
            assert "BATON_KV_EVENTS_ENDPOINT" not in variables, "instances on one machine cannot share it"
            assert variables["BATON_KV_STORE"] == "", "the plan has none, whatever we were started with"


@pytest.mark.parametrize(("metrics_key", "given"), [("four", "four"), (None, "three")])
async def test_all_get_the_metrics_key_and_without_one_instances_take_the_admin_key_for_it(
    tmp_path: Path, metrics_key: str | None, given: str
) -> None:
    async with fleet(tmp_path, admin_key="three", metrics_key=metrics_key) as running:
        await running.until(lambda: "Dashboard" in running.log.getvalue(), "the banner")
        for pid in running.pids():
            assert _environment(pid)["BATON_METRICS_KEY"] == given


async def test_what_is_killed_is_started_again_the_router_at_its_old_port(tmp_path: Path) -> None:
    async with fleet(tmp_path) as running:
        await running.until(lambda: "Dashboard" in running.log.getvalue(), "the banner")
        url, (router, first, _) = running.supervisor.url, running.pids()
        os.kill(first, signal.SIGKILL)
        os.kill(router, signal.SIGKILL)
        await running.until(lambda: running.log.getvalue().count("life 2)") == 2, "both again")
        assert running.supervisor.url == url
        assert "was ended by SIGKILL; started again now" in running.log.getvalue()


async def test_one_that_left_by_itself_is_replaced(tmp_path: Path) -> None:
    async with fleet(tmp_path) as running:
        await running.until(lambda: "Dashboard" in running.log.getvalue(), "the banner")
        os.kill(running.pids()[1], signal.SIGTERM)
        await running.until(lambda: "life 2)" in running.log.getvalue(), "another in its place")
        assert "ended; started again" in running.log.getvalue()


async def test_one_that_cannot_start_is_given_up_and_the_others_serve(tmp_path: Path) -> None:
    async with fleet(tmp_path, how={"decode-1": "broken"}) as running:
        await running.until(lambda: "Dashboard" in running.log.getvalue(), "the banner")
        assert running.started("decode-1") == FAILED_STARTS_MAX
        assert "decode-1 │ the disk is on fire" in running.log.getvalue()
        assert "without decode-1" in running.log.getvalue()


async def test_when_none_that_answers_can_start_it_ends_with_a_code(tmp_path: Path) -> None:
    async with fleet(tmp_path, how={"decode-1": "broken", "decode-2": "broken"}) as running:
        assert await running.code() == EXIT_FAILED
    told = running.notes.read_text().splitlines().count("router told")
    assert told == 1, "it ends those who wait for an instance, with an error"


async def test_a_router_that_cannot_start_is_not_tried_again(tmp_path: Path) -> None:
    async with fleet(tmp_path, how={ROUTER: "broken"}) as running:
        assert await running.code() == EXIT_FAILED
    assert running.log.getvalue().count("no such port") == 1
    assert running.started("decode-1") == 0


async def test_a_fleet_gives_up_at_once_on_what_cannot_get_better(tmp_path: Path) -> None:
    async with fleet(tmp_path, decode=3, how={"decode-2": "refused"}) as running:
        assert await running.code() == EXIT_SETUP
    assert running.started("decode-2") == 1
    told = [line for line in running.log.getvalue().splitlines() if "broken" in line]
    assert told == ["baton up: the model is broken"]
    assert "Dashboard" not in running.log.getvalue()


async def test_wrong_options_are_shown_as_the_instance_told_them(tmp_path: Path) -> None:
    async with fleet(tmp_path, how={"decode-1": "usage", "decode-2": "usage"}) as running:
        assert await running.code() == EXIT_SETUP
    assert "no such option" in running.log.getvalue()
    assert "cannot be started, and starting it again would not help" in running.log.getvalue()


async def test_a_refusal_after_the_fleet_was_up_ends_one_instance_only(tmp_path: Path) -> None:
    async with fleet(tmp_path) as running:
        await running.until(lambda: "Dashboard" in running.log.getvalue(), "the banner")
        running.supervisor._plan.how["decode-1"] = "refused"
        os.kill(running.pids()[1], signal.SIGKILL)
        await running.until(lambda: "given up" in running.log.getvalue(), "it was tried once more")
        assert running.started("decode-1") + running.started("decode-2") == 3
        assert not running.run.done()


async def test_stopping_lets_the_router_end_before_the_instances_are_told(tmp_path: Path) -> None:
    async with fleet(tmp_path) as running:
        await running.until(lambda: "Dashboard" in running.log.getvalue(), "the banner")
        running.supervisor.stop()
        assert await running.code() == 0
    told = [line for line in running.notes.read_text().splitlines() if line.endswith("told")]
    assert told[0] == "router told"
    assert sorted(told[1:]) == ["decode-1 told", "decode-2 told"]


async def test_a_second_word_ends_those_who_do_not_listen(tmp_path: Path) -> None:
    async with fleet(tmp_path, how={"decode-1": "deaf"}) as running:
        await running.until(lambda: "Dashboard" in running.log.getvalue(), "the banner")
        running.supervisor.stop()
        await running.until(lambda: "decode-2 told" in running.notes.read_text(), "the instances told")
        running.supervisor.stop()
        assert await running.code() == EXIT_AT_ONCE


async def test_a_stop_while_everything_starts_leaves_nothing(tmp_path: Path) -> None:
    async with fleet(tmp_path) as running:
        await running.until(lambda: running.started("decode-1") > 0, "the first instance")
        running.supervisor.stop()
        assert await running.code() == 0


async def test_how_many_processes_are_ready_is_told_until_all_are(tmp_path: Path) -> None:
    async with fleet(tmp_path) as running:
        await running.until(lambda: "Dashboard" in running.log.getvalue(), "the banner")
        told = list(running.shown.told)
        assert told[0] == "starting the router and its instances"
        assert told[1:5] == [f"{ready} of 3 processes" for ready in range(4)]
        assert told[5:] == ["ended", "closed"]


async def test_a_start_that_fails_is_not_told_to_have_ended(tmp_path: Path) -> None:
    async with fleet(tmp_path, decode=1, how={"decode-1": "refused"}) as running:
        await running.code()
        assert running.shown.told == [
            "starting the router and its instances", "0 of 2 processes", "1 of 2 processes", "closed",
        ]  # fmt: skip
