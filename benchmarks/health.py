"""How quickly trouble is seen, with real processes: the figures behind what `/health` and a router promise.

    alone       SIGSTOP of the engine of a single `baton serve` until /health answers 503; its requests, its exit
    routed      SIGSTOP of the engine of one instance of `baton up` until the router takes it out, and until it is back
    instance    SIGSTOP of a whole instance until `baton up` has started it again
    router      kill -9 of the router: from the answer of its new port until it has its instances again
    left        a client that leaves while a pair of instances works for it: until nothing is held
    slow steps  a model whose steps take long: how often /health, /ready or the router complain

Owns the processes that it starts, and touches no other. Needs no model.
"""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from baton.bench.chaos_signals import engine_of
from baton.bench.child_processes import Child, ChildFailed, started
from baton.node.baton_command import baton_command

START_S_MAX = 180.0
LIMIT_S = 90.0
POLL_S = 0.02
SCRIPTED = ("--executor", "scripted")
HELD = ("running", "waiting", "used", "leased", "receiving", "leaving")
TAKEN_OUT = frozenset({"suspected", "stuck", "lost"})
_SERVED = re.compile(r"(?:is served at|API\s+) ?(http://[^\s/]+)")

Body = dict[str, Any]


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    status: int
    body: str

    def json(self) -> Body:
        made: Body = json.loads(self.body)
        return made


def get(url: str, body: Body | None = None, limit_s: float = LIMIT_S) -> HttpAnswer:
    """GET, or POST where there is a body. Raises OSError where nobody answers."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})  # noqa: S310  our own servers
    try:
        with urllib.request.urlopen(request, timeout=limit_s) as response:  # noqa: S310
            return HttpAnswer(response.status, response.read().decode())
    except urllib.error.HTTPError as error:
        with error:
            return HttpAnswer(error.code, error.read().decode())


def until(holds: Callable[[], bool], what: str, limit_s: float = LIMIT_S) -> float:
    """Seconds until it holds."""
    began_s = time.monotonic()
    while not _holds(holds):
        if time.monotonic() - began_s > limit_s:
            raise ChildFailed(f"not within {limit_s:g} s: {what}")
        time.sleep(POLL_S)
    return time.monotonic() - began_s


def _holds(condition: Callable[[], bool]) -> bool:
    try:
        return condition()
    except OSError:
        return False


@contextmanager
def serving(*words: str) -> Iterator[tuple[Child, str]]:
    """A `baton` process, and its address."""
    with started(f"baton {words[0]}", baton_command(*words), {"NO_COLOR": "1"}) as child:

        def has_address() -> bool:
            child.check_alive()
            return _SERVED.search(child.output()) is not None

        until(has_address, "its address", START_S_MAX)
        found = _SERVED.search(child.output())
        yield child, "" if found is None else found[1]


@contextmanager
def fleet(*words: str) -> Iterator[tuple[Child, str]]:
    with serving("up", "--router-port", "0", *SCRIPTED, *words) as (child, url):
        until(lambda: bool(instances(url)), "its instances")
        yield child, url


def instances(url: str) -> dict[str, Body]:
    return {one["name"]: one for one in get(f"{url}/v1/instances").json()["data"] if one["state"] == "ready"}


class OpenRequest:
    """A request on a thread of its own."""

    def __init__(self, url: str, tokens: int, stream: bool = False) -> None:
        body = {"model": "scripted", "prompt": "hello", "max_tokens": tokens, "ignore_eos": True, "stream": stream}
        self.answer: HttpAnswer | None = None
        self.failure: OSError | None = None
        self.took_s = 0.0
        self._thread = threading.Thread(target=self._ask, args=(f"{url}/v1/completions", body), daemon=True)
        self._thread.start()

    def _ask(self, url: str, body: Body) -> None:
        began_s = time.monotonic()
        try:
            self.answer = get(url, body, 3600)
        except OSError as error:
            self.failure = error
        self.took_s = time.monotonic() - began_s

    def wait(self, limit_s: float = LIMIT_S) -> HttpAnswer:
        self._thread.join(limit_s)
        if self.answer is None:
            raise ChildFailed(f"no answer within {limit_s:g} s: {self.failure}")
        return self.answer


@dataclass(frozen=True, slots=True)
class AloneFigures:
    seen_s: float
    health: HttpAnswer
    ready: HttpAnswer
    whole: HttpAnswer
    """The answer to an open request."""
    streamed: HttpAnswer
    exit_code: int
    output: str


def alone() -> AloneFigures:
    with serving("serve", "--port", "0", *SCRIPTED, "--step-ms", "50") as (child, url):
        open_requests = [OpenRequest(url, 4000), OpenRequest(url, 4000, stream=True)]
        until(lambda: "baton_num_requests_running 2" in _numbers(get(f"{url}/metrics").body), "both running")
        os.kill(engine_of(child.pid), signal.SIGSTOP)
        seen_s = until(lambda: get(f"{url}/health").status == 503, "a stopped engine to be seen")
        health, ready = get(f"{url}/health"), get(f"{url}/ready")
        whole, streamed = (request.wait() for request in open_requests)
        return AloneFigures(seen_s, health, ready, whole, streamed, child.wait(LIMIT_S), child.output())


def _numbers(page: str) -> str:
    """A metrics page without labels."""
    return re.sub(r"\{[^}]*\}", "", page).replace(".0\n", "\n")


@dataclass(frozen=True, slots=True)
class RoutedFigures:
    seen_s: float
    back_s: float
    """Until the instance serves again, in another process."""
    answers: list[HttpAnswer]


def routed(*, whole_instance: bool = False) -> RoutedFigures:
    """Stop the engine of an instance, or both of its processes, while it answers."""
    with fleet("--mixed", "2", "--step-ms", "20") as (_, url):
        until(lambda: len(instances(url)) == 2, "both instances")
        asked = [OpenRequest(url, 600) for _ in range(4)]
        until(lambda: all(one["open"] for one in instances(url).values()), "requests at both instances")
        before = instances(url)
        name, victim = next(iter(before.items()))
        pids = (engine_of(victim["pid"]), *((victim["pid"],) if whole_instance else ()))
        last = _last_event(url)
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        began_s = time.monotonic()
        seen_s = until(lambda: _was_taken_out(url, name, last), "the router to take it out")
        until(lambda: instances(url).get(name, before[name])["pid"] != victim["pid"], "another life of it")
        return RoutedFigures(seen_s, time.monotonic() - began_s, [request.wait() for request in asked])


def _last_event(url: str) -> int:
    return max((event["number"] for event in get(f"{url}/v1/instances").json()["events"]), default=0)


def _was_taken_out(url: str, name: str, after: int) -> bool:
    events = get(f"{url}/v1/instances").json()["events"]
    return any(event["number"] > after and event["name"] == name and event["what"] in TAKEN_OUT for event in events)


def router_back() -> float:
    """Seconds from the first answer of a restarted router until it has its instances again."""
    with fleet("--mixed", "2") as (up, url):
        until(lambda: len(instances(url)) == 2, "both instances")
        os.kill(_router_pid(up.pid), signal.SIGKILL)
        until(lambda: not _answers(url), "the old router to be gone")
        until(lambda: _answers(url), "the port of the new router")
        return until(lambda: len(instances(url)) == 2, "its instances")


def _answers(url: str) -> bool:
    try:
        return get(f"{url}/health", limit_s=1.0).status == 200
    except OSError:
        return False


def _router_pid(up_pid: int) -> int:
    """The router among the processes that `baton up` has started."""
    for child in Path(f"/proc/{up_pid}/task/{up_pid}/children").read_text().split():
        if b"router" in Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0"):
            return int(child)
    raise ChildFailed("baton up has no router")


def left() -> float:
    """Seconds from a client's leaving until neither instance of a pair holds anything for it."""
    with fleet("--prefill", "1", "--decode", "1", "--step-ms", "100") as (_, url):
        until(lambda: len(instances(url)) == 2, "both instances")
        body = {"model": "scripted", "prompt": "hello " * 40, "max_tokens": 4000, "ignore_eos": True, "stream": True}
        data = json.dumps(body).encode()
        request = urllib.request.Request(f"{url}/v1/completions", data, {"Content-Type": "application/json"})  # noqa: S310
        with urllib.request.urlopen(request, timeout=LIMIT_S) as response:  # noqa: S310
            response.readline()
            until(lambda: bool(_held(url)), "the request at an instance")
        return until(lambda: not _held(url), "nothing to be held")


def _held(url: str) -> int:
    return sum(one["open"] + sum(one["ledger"][name] for name in HELD) for one in instances(url).values())


@dataclass(slots=True)
class SlowFigures:
    step_s: float
    served_s: float = 0.0
    looks: int = 0
    complaints: list[str] = field(default_factory=list)
    answers: list[HttpAnswer] = field(default_factory=list)


def slow_steps(step_s: float, steps: int, *words: str) -> SlowFigures:
    """A router and an instance whose steps take `step_s`; one request over `steps` of them, /health asked all the time."""
    made = SlowFigures(step_s)
    with fleet("--mixed", "1", "--step-ms", str(step_s * 1000), *words) as (_, url):
        first, last = next(iter(instances(url).values())), _last_event(url)
        request = OpenRequest(url, steps)
        began_s = time.monotonic()
        while request.answer is None and request.failure is None:
            for at in (url, first["url"]):
                for path in ("/health", "/ready"):
                    answer = get(f"{at}{path}")
                    made.looks += 1
                    if answer.status != 200:
                        made.complaints.append(f"{at}{path}: {answer.body}")
            time.sleep(0.2)
        made.served_s = time.monotonic() - began_s
        made.answers.append(request.wait())
        events = get(f"{url}/v1/instances").json()["events"]
        made.complaints += [f"{e['name']} {e['what']}: {e['why']}" for e in events if e["number"] > last]
    return made


StepSeconds = Annotated[float, typer.Option(help="Seconds that a step takes.", min=0.1)]
Steps = Annotated[int, typer.Option(help="Steps of such a request; 0 leaves it out.", min=0)]
Only = Annotated[bool, typer.Option("--slow-steps-only", help="Leave the other figures out.")]


@dataclass(slots=True)
class HealthVerdict:
    """Prints what was measured, and keeps what is beyond a limit."""

    failures: list[str] = field(default_factory=list)

    def took(self, what: str, seconds: float, limit_s: float | None = None) -> None:
        typer.echo(f"{what} {seconds:.2f} s" + ("" if limit_s is None else f" (limit {limit_s:g} s)"))
        if limit_s is not None and seconds > limit_s:
            self.failures.append(f"{what} {seconds:.2f} s, limit {limit_s:g} s")

    def answered(self, what: str, answers: Sequence[HttpAnswer]) -> None:
        self.failures += [f"{what}: {answer.status} {answer.body[:200]}" for answer in answers if answer.status != 200]

    def slow(self, figures: SlowFigures) -> None:
        served = f"steps of {figures.step_s:g} s: served for {figures.served_s:.0f} s"
        typer.echo(f"{served}, {figures.looks} looks at /health and /ready")
        statuses = ", ".join(str(answer.status) for answer in figures.answers) or "none"
        typer.echo(f"  complaints: {len(figures.complaints)}; the answer: {statuses}")
        for complaint in figures.complaints[:20]:
            typer.echo(f"    {complaint}")
        if figures.complaints:
            self.failures.append(f"{len(figures.complaints)} complaints about slow steps")
        self.answered("a request over slow steps", figures.answers)


def health(slow_step: StepSeconds = 30.0, slow_steps_count: Steps = 10, only_slow: Only = False) -> None:
    """How quickly a hung engine, a hung instance, a lost router and a client that left are seen; and that a slow model is
    left in peace.

    Exit code 1 when something takes longer than its limit, an answer fails, or anybody complains about slow steps.
    """
    verdict = HealthVerdict()
    if not only_slow:
        _measure_losses(verdict)
    if slow_steps_count:
        verdict.slow(slow_steps(slow_step, slow_steps_count))
    for failure in verdict.failures:
        typer.echo(f"FAILED {failure}", err=True)
    raise typer.Exit(1 if verdict.failures else 0)


def _measure_losses(verdict: HealthVerdict) -> None:
    verdict.took("SIGSTOP of a lone engine: /health answers 503 after", alone().seen_s, 5.0)
    figures = routed()
    verdict.took("SIGSTOP of an engine behind a router: taken out after", figures.seen_s, 5.0)
    verdict.took("  and it serves again after", figures.back_s)
    hung = routed(whole_instance=True)
    verdict.took("SIGSTOP of a whole instance: taken out after", hung.seen_s, 5.0)
    verdict.took("  and it serves again after", hung.back_s)
    verdict.answered("a request of a fleet with a hung process", [*figures.answers, *hung.answers])
    verdict.took("a router that was killed has its instances again after", router_back(), 2.0)
    verdict.took("a client that left: nothing is held after", left(), 3.0)
