"""Runs a fleet: starts its processes, restarts them when they end or hang, and stops them all together.

    start    the router and, when it listens, the instances; the banner when all have joined
    hang     a process that answers no `/health` for a while (`up.health_watch`) gets SIGUSR1 and RECORDED_WITHIN_S to write
             its last decisions, is killed, and so started again
    signal   drain: the router takes nothing new and ends with its last answer; then the instances (a second: at once)
    SIGUSR1  goes on to all: each writes its last decisions to a file
    failure  the router cannot be started, or no serving instance is left: the exit code is not 0
    refused  before all serve, one says that starting it again does not help (a model, an option): the fleet ends at once

Promises that no process outlives it: children are stopped on every way out, and the kernel ends them if this process is
killed. `up.restarts` decides when a process is restarted, `up.fleet_plan` what is started.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import aiohttp
import msgspec

from baton.api.auth import secret_of
from baton.core.errors import EXIT_SETUP
from baton.node.clock import monotonic_us
from baton.node.log_lines import as_text
from baton.node.parent_process import bound_to
from baton.node.process_activity import ProcessActivity
from baton.node.recording import DUMP_SIGNAL
from baton.node.stage_progress import PartUnit, StageProgress
from baton.node.start_stages import StartStages, stage_of, summary_in
from baton.up.fleet_plan import SERVING_ROLES, FleetPlan, PlannedProcess, RouterPorts
from baton.up.health_watch import ANSWER_US, ASK_US, HealthWatch
from baton.up.merged_log import LineSplitter, MergedLog
from baton.up.process_environment import process_environments
from baton.up.restarts import GiveUp, RestartAfter, RestartPolicy

ROUTER = "router"
HELD_LINES_MAX = 40
READ_BYTES = 64 * 1024
LOOK_EVERY_S = 0.1
JOIN_WAIT_S = 5.0
"""Seconds that the banner waits for an instance that is ready but not admitted; the instance has logged why by then."""
LAST_LINES_S = 1.0
"""Seconds to wait for the last output of an ended process."""
STOP_GRACE_S = 10.0
"""Seconds beyond the drain timeout after which remaining processes are killed."""
RECORDED_WITHIN_S = 2.0
"""Seconds that a process that hangs has for writing its last decisions."""
DISMISSED_S = 2.0
"""Seconds that a router without instances has to end, after each signal."""
EXIT_FAILED, EXIT_AT_ONCE = 1, 130
NO_HEADERS: Mapping[str, str] = MappingProxyType({})

_SERVED = re.compile(r"^(\S+) is served at (https?://\S+)", re.MULTILINE)
_JOIN = re.compile(r"instances join at (\S+:\d+)")
_NOISE = re.compile(r"^(talk to it with|ask it through|instances join at|watch it at|for the router at)")
"""Startup lines that the banner replaces."""
_REFUSAL = re.compile(r"baton (?:serve|router): (.+)")


@dataclass(slots=True)
class SupervisedProcess:
    """A member of the fleet, and its current process."""

    name: str
    serves: bool
    command: Callable[[], list[str]]
    environment: Mapping[str, str]
    restarts: RestartPolicy
    process: asyncio.subprocess.Process | None = None
    given_up: bool = False
    output: deque[str] = field(default_factory=lambda: deque(maxlen=HELD_LINES_MAX))
    """Its output since the start, held back until the start has succeeded or failed."""
    supervision: asyncio.Task[None] | None = None
    health: asyncio.Task[None] | None = None
    """Asks for its health, from when it is ready until it ends."""

    @property
    def is_up(self) -> bool:
        return self.restarts.is_ready


class Supervisor:
    def __init__(self, plan: FleetPlan, log: MergedLog, cores: int, starting: StartStages) -> None:
        """`starting` is told how many of the processes are ready, until all are."""
        self._plan = plan
        self._log = log
        self._cores = cores
        self._starting = starting
        environments = process_environments(plan)
        self._of_instances = environments.instance
        self._bind_to_parent = bound_to(os.getpid())
        self._ports = RouterPorts(plan.router_port)
        self._join = self._served = ""
        self._refusal = ""
        """Why starting again does not help, as a process said before the banner."""
        self._is_open = False
        """Whether the banner was printed."""
        self.url = ""
        """Of the API; set when the router is up."""
        self._router = self._child(ROUTER, False, lambda: plan.router_command(self._ports), environments.router)
        self._members = [self._instance(member) for member in plan.members]
        self._stopping = asyncio.Event()
        self._at_once = asyncio.Event()
        self._changed = asyncio.Event()
        """Set by every change that may end a wait."""
        self._readers: set[asyncio.Task[None]] = set()

    def _child(
        self, name: str, serves: bool, command: Callable[[], list[str]], environment: Mapping[str, str]
    ) -> SupervisedProcess:
        return SupervisedProcess(name, serves, command, environment, RestartPolicy(self._plan.restart_delay_us_max))

    def _instance(self, member: PlannedProcess) -> SupervisedProcess:
        return self._child(
            member.name,
            member.role in SERVING_ROLES,
            lambda: self._plan.member_command(member, self._join, self._cores),
            self._of_instances,
        )

    # ── life cycle ───────────────────────────────────────────────────────────────────────────────────────────────────────

    async def run(self) -> int:
        """Run until told to stop or until nothing serves; returns the exit code."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop)
        loop.add_signal_handler(DUMP_SIGNAL, self.order_dumps)
        try:
            await self._open()
            await self._until(lambda: self._failure() is not None)
            failure = self._failure()
            if failure is not None:
                self._log.say(f"baton up: {failure}")
                await self._dismiss_router()
                return EXIT_SETUP if self._refusal else EXIT_FAILED
            return await self._drain()
        finally:
            await self._end_all()

    def stop(self) -> None:
        """Drain; when called again, stop at once."""
        if self._stopping.is_set():
            self._at_once.set()
        self._stopping.set()
        self._changed.set()

    def order_dumps(self) -> None:
        """Have all processes write their last decisions. One that is not ready has none, and no handler."""
        for child in (self._router, *self._members):
            if child.is_up and child.process is not None and child.process.returncode is None:
                child.process.send_signal(DUMP_SIGNAL)

    async def _open(self) -> None:
        """Start everything, and print the banner when it serves; returns early on a failure or a signal."""
        self._starting.begin("starting the router and its instances")
        self._tell_ready()
        missing = await self._opened()
        if missing is not None:
            self._starting.end()
            self._log.say(banner(self._plan, self._served, self.url, missing))
        self._starting.close()

    async def _opened(self) -> list[str] | None:
        """Instances that are missing when all others serve; None on a failure or a signal."""
        self._start(self._router)
        await self._until(lambda: self._router.is_up or self._router.given_up)
        if self._stopping.is_set() or self._failure():
            return None
        for child in self._members:
            self._start(child)
        await self._until(lambda: bool(self._refusal) or all(child.is_up or child.given_up for child in self._members))
        missing = await self._missing()
        self._is_open = True
        return missing

    def _tell_ready(self) -> None:
        every = (self._router, *self._members)
        ready = sum(child.is_up for child in every)
        self._starting.advance(StageProgress(ready, len(every), PartUnit.PROCESSES))

    async def _until(self, condition: Callable[[], bool]) -> None:
        """Wait for the condition or for a signal."""
        while not condition() and not self._stopping.is_set():
            self._changed.clear()
            await self._changed.wait()

    def _failure(self) -> str | None:
        """Why nothing can be served any more, or never could; None where it can."""
        if self._refusal:
            return self._refusal
        if self._router.given_up:
            return "the router cannot be started"
        if all(child.given_up for child in self._members if child.serves):
            return "none of the instances that answer requests can be started"
        return None

    async def _missing(self) -> list[str] | None:
        """Instances that have not joined once all others have, or PATIENCE_S after the start if a serving one has joined.

        None where a signal came first.
        """
        deadline_s = time.monotonic() + JOIN_WAIT_S
        key = self._plan.admin_key or next(map(secret_of, self._plan.api_keys), None)
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        async with _asking(5.0, headers) as http:
            while not self._stopping.is_set() and not self._failure():
                ready = await _ready_instances(http, self.url)
                missing = [child for child in self._members if child.given_up or child.name not in ready]
                is_late = time.monotonic() > deadline_s and any(
                    child.serves and child.name in ready for child in self._members
                )
                if is_late or all(child.given_up for child in missing):
                    return [child.name for child in missing]
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._stopping.wait(), LOOK_EVERY_S)
        return None

    # ── stopping ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _drain(self) -> int:
        self._log.say("draining: open requests finish, new ones are refused (once more to stop at once)")
        for children in ([self._router], self._members):
            running = [child.process for child in children if child.process is not None and child.process.returncode is None]
            for process in running:
                _signal(process, signal.SIGCONT)
                _signal(process, signal.SIGTERM)
            await self._ended(running)
            if self._at_once.is_set():
                return EXIT_AT_ONCE
        return 0

    async def _dismiss_router(self) -> None:
        """No instance will answer: one signal keeps new requests out, a second ends those that wait, with an error."""
        self._stopping.set()  # it is not started again
        process = self._router.process
        for _ in range(2):
            if process is not None and process.returncode is None:
                _signal(process, signal.SIGTERM)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(process.wait(), DISMISSED_S)

    async def _ended(self, processes: list[asyncio.subprocess.Process]) -> None:
        """Wait until all have ended, the time is up, or a second signal came."""
        ends = [asyncio.ensure_future(process.wait()) for process in processes]
        at_once = asyncio.ensure_future(self._at_once.wait())
        together = asyncio.ensure_future(asyncio.gather(*ends))
        limit_s = self._plan.drain_timeout_s + STOP_GRACE_S
        await asyncio.wait((together, at_once), timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        for waiting in (together, at_once):
            waiting.cancel()
        await asyncio.gather(together, at_once, return_exceptions=True)

    async def _end_all(self) -> None:
        self._stopping.set()
        self._changed.set()
        supervision = [child.supervision for child in (self._router, *self._members) if child.supervision is not None]
        for child in (self._router, *self._members):
            if child.process is not None and child.process.returncode is None:
                _signal(child.process, signal.SIGKILL)
        await asyncio.gather(*supervision, return_exceptions=True)
        if self._readers:
            await asyncio.wait(self._readers, timeout=LAST_LINES_S)
        for reader in self._readers:
            reader.cancel()

    # ── one process ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _start(self, child: SupervisedProcess) -> None:
        child.supervision = asyncio.create_task(self._supervise(child))
        child.supervision.add_done_callback(self._on_supervision_end)

    def _on_supervision_end(self, task: asyncio.Task[None]) -> None:
        """An error of our own must not leave a process unsupervised: it stops the whole fleet."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self._log.say(f"baton up: {type(error).__name__}: {error}")
            self.stop()

    async def _supervise(self, child: SupervisedProcess) -> None:
        """Run the process again and again until told to stop."""
        while not self._stopping.is_set():
            code = await self._run_once(child)
            if self._stopping.is_set():
                return
            first_of_router = child is self._router and not self.url
            verdict = child.restarts.ended(code, monotonic_us())
            if isinstance(verdict, GiveUp) and code == EXIT_SETUP and not self._is_open:
                self._refuse(child)
                return
            self._explain(child)
            if isinstance(verdict, GiveUp) or first_of_router:
                self._log.note(child.name, f"{_ending(code)} before it was ready: given up")
                child.given_up = True
                self._changed.set()
                return
            await self._pause(child, code, verdict)

    def _refuse(self, child: SupervisedProcess) -> None:
        """Give the fleet up with the sentence of a process that starting again does not help."""
        said = [found[1] for line in child.output if (found := _REFUSAL.match(as_text(line)))]
        if not said:  # wrong options, which have more lines
            self._explain(child)
            said.append(f"{child.name} cannot be started, and starting it again would not help")
        self._refusal = self._refusal or said[-1]
        child.given_up = True
        self._changed.set()

    async def _pause(self, child: SupervisedProcess, code: int, verdict: RestartAfter) -> None:
        delay_s = max(0.0, (verdict.at_us - monotonic_us()) / 1e6)
        when = f"in {delay_s:.1f} s" if delay_s > 0.05 else "now"
        self._log.note(child.name, f"{_ending(code)}; started again {when}")
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), delay_s)

    async def _run_once(self, child: SupervisedProcess) -> int:
        """Run the process once; returns its exit code."""
        child.output.clear()
        child.restarts.started()
        try:
            process = await self._spawn(child)
        except OSError as error:
            child.output.append(f"cannot start a process: {error}")
            return EXIT_FAILED
        child.process = process
        if self._stopping.is_set():
            _signal(process, signal.SIGKILL)  # `_end_all` may have run before this process existed
        reader = asyncio.create_task(self._read(child, process))
        self._readers.add(reader)
        reader.add_done_callback(self._readers.discard)
        code = await process.wait()
        if child.health is not None:
            child.health.cancel()
            child.health = None
        # Its engine may keep the pipe open a moment longer, and its last output explains the end.
        await asyncio.wait((reader,), timeout=LAST_LINES_S)
        return code

    async def _spawn(self, child: SupervisedProcess) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            *child.command(),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=child.environment,
            start_new_session=True,  # Ctrl-C goes to this process alone, which stops the others in order
            preexec_fn=self._bind_to_parent,
        )

    async def _read(self, child: SupervisedProcess, process: asyncio.subprocess.Process) -> None:
        if process.stdout is None:
            raise RuntimeError(f"{child.name} was started without a pipe to read")
        splitter = LineSplitter()
        while piece := await process.stdout.read(READ_BYTES):
            for line in splitter.feed(piece):
                self._take_line(child, process, line)
        for line in splitter.close():
            self._take_line(child, process, line)

    def _take_line(self, child: SupervisedProcess, process: asyncio.subprocess.Process, line: str) -> None:
        if child.is_up or process is not child.process:
            if _NOISE.match(as_text(line)) is None and not self._is_shutdown_noise(child, line):
                self._log.line(child.name, line)
            return
        text = as_text(line)
        if stage_of(text) is not None:
            self._log.note(child.name, text)
            return
        child.output.append(line)
        if child is self._router:
            self._take_router_line(text)
        elif found := _SERVED.search(text):
            self._is_ready(child, found[2])

    def _is_shutdown_noise(self, child: SupervisedProcess, line: str) -> bool:
        """Whether the line is about the shutdown that was ordered: instances then report each other's and the router's
        absence."""
        return self._stopping.is_set() and child is not self._router and " ERROR " not in as_text(line)

    def _take_router_line(self, line: str) -> None:
        if found := _JOIN.search(line):
            self._join = found[1]
        if found := _SERVED.search(line):
            self._served, self.url = found[1], found[2]
        output = "\n".join(as_text(line) for line in self._router.output)
        if _SERVED.search(output) and _JOIN.search(output):
            self._ports = RouterPorts(int(self.url.rpartition(":")[2]), int(self._join.rpartition(":")[2]))
            self._is_ready(self._router, self.url)

    def _is_ready(self, child: SupervisedProcess, url: str) -> None:
        summary = summary_in("\n".join(map(as_text, child.output)))
        for line in child.output:
            text = as_text(line)
            if " WARNING " in text or " ERROR " in text:
                self._log.line(child.name, line)
        child.output.clear()
        child.restarts.ready(monotonic_us())
        self._tell_ready()
        if child.process is not None:
            child.health = asyncio.create_task(self._end_if_hung(child, child.process, url))
        pid = child.process.pid if child.process is not None else 0
        again = f", life {child.restarts.lives}" if child.restarts.lives > 1 else ""
        self._log.note(child.name, f"ready (pid {pid}{again})" + (f", {summary}" if summary else ""))
        self._changed.set()

    async def _end_if_hung(self, child: SupervisedProcess, process: asyncio.subprocess.Process, url: str) -> None:
        """Kill the process when it hangs, so that it is started again."""
        watch, activity, is_hung = HealthWatch(monotonic_us()), ProcessActivity(process.pid), False
        async with _asking(ANSWER_US / 1e6) as http:
            while not is_hung:
                await asyncio.sleep(ASK_US / 1e6)
                is_good = await _is_healthy(http, url)
                if is_good:
                    activity.spoke()
                is_hung = watch.answered(is_good, is_good or activity.runs(), monotonic_us())
        if not self._stopping.is_set():
            self._log.note(child.name, f"hangs: no good answer to /health for {watch.unhealthy_us // 1_000_000} s; killed")
            if not activity.is_stopped():
                await _record(process)
            _signal(process, signal.SIGKILL)

    def _explain(self, child: SupervisedProcess) -> None:
        """Print the output of a process that ended before it was ready."""
        for line in child.output:
            self._log.line(child.name, line)
        child.output.clear()


def banner(plan: FleetPlan, served: str, url: str, missing: list[str]) -> str:
    counts = (("prefill", plan.prefill), ("decode", plan.decode), ("mixed", plan.mixed))
    made_of = ", ".join(f"{count} {role}" for role, count in counts if count)
    one = next(member.name for member in plan.members if member.role in SERVING_ROLES)
    button = " (with a button that kills the instance serving you)" if plan.demo else ""
    lines = [
        "",
        f"  {served} is served by a router and {made_of}" + (f" — without {', '.join(missing)}" if missing else ""),
        "",
        f"  API        {url}/v1",
        f"  Dashboard  {url}/dashboard{button}",
        f"  Chat       baton chat --url {url}",
        f"  Drain one  baton drain {one} --url {url}  (it is started again when it has ended)",
        "  Stop       Ctrl-C: open requests finish (twice: at once)",
        "",
    ]
    return "\n".join(lines)


class _Listed(msgspec.Struct):
    name: str
    state: str


class _Instances(msgspec.Struct):
    data: list[_Listed]


def _asking(limit_s: float, headers: Mapping[str, str] = NO_HEADERS) -> aiohttp.ClientSession:
    """To ask processes of this fleet. They are children on this machine, whose certificate is for another name than that of
    the address which they listen on: it is not verified."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(ssl=False), timeout=aiohttp.ClientTimeout(total=limit_s), headers=headers
    )


async def _ready_instances(http: aiohttp.ClientSession, url: str) -> list[str]:
    """Names of the instances in state ready; empty while the router does not answer."""
    try:
        async with http.get(f"{url}/v1/instances") as response:
            found = msgspec.json.decode(await response.read(), type=_Instances)
    except (aiohttp.ClientError, TimeoutError, OSError, msgspec.DecodeError):
        return []
    return [one.name for one in found.data if one.state == "ready"]


async def _is_healthy(http: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with http.get(f"{url}/health") as response:
            return response.status == 200
    except (aiohttp.ClientError, TimeoutError, OSError):
        return False


def _ending(code: int) -> str:
    if code >= 0:
        return f"ended with code {code}" if code else "ended"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"


async def _record(process: asyncio.subprocess.Process) -> None:
    """Have a process that hangs write its last decisions, and give it time for that. Nobody tells when it has."""
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(DUMP_SIGNAL)
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(process.wait(), RECORDED_WITHIN_S)


def _signal(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
    """Signal the whole session of the process, so that its children get it too."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)
