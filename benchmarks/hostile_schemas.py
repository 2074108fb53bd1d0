"""How soon schemas that are made to be dear are refused: the first one after a start, and another of the same kind.

    cold   a new server, asked as soon as it says that it serves
    warm   the same server, asked for a second schema of the same kind, which it does not know

Both are judged: an answer after more than 2 s, or one with another status than 200, 400 or 413, is a failure, and so is
more memory than the limits below. Memory is the largest resident size of the front end and of one process that compiles,
sampled while they work.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import select
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import msgspec
import typer
from rich.console import Console

from baton.bench.machine import other_load
from benchmarks.health import serving
from benchmarks.options import JsonIfGiven
from benchmarks.runner import (
    BadBenchmarkOptions,
    Experiment,
    Progress,
    Report,
    notes_on_other_load,
    run_benchmark,
    shown_load,
    table_of,
)

ANSWER_S_MAX = 2.0
STATUSES = frozenset({200, 400, 413})
FRONT_END_MIB_MAX = 400
"""Of the whole process: about 90 without a request, and some copies of a body."""
COMPILER_MIB_MAX = 640
"""Of the whole process: 512 for what it compiles, beside what it holds when idle."""
BODY_BYTES = 4 << 20
"""The limit of servers on bodies."""
SCRIPTED = "--executor scripted"
LOOK_S = 0.02
PATIENCE_S = 120.0
REFUSAL_S = 10.0
WORKER = b"baton.node.constraint_worker"

Fields = dict[str, object]


# ── what is sent ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _schema(schema: Fields) -> Fields:
    return {"guided_json": schema}


def _large(size_bytes: int) -> Callable[[int], Fields]:
    """Properties until the body has so many bytes."""

    def made(number: int) -> Fields:
        each = len('"p000000":{"type":"string"},')
        return _schema(
            {"title": f"{number}", "properties": {f"p{i:06}": {"type": "string"} for i in range(size_bytes // each)}}
        )

    return made


def _levels(count: int) -> Callable[[int], Fields]:
    """Written as text: encoders of such a value give up."""

    def made(number: int) -> Fields:
        head, tail = b'{"properties":{"a":' * count, b"}}" * count
        return {"guided_json": msgspec.Raw(head + b'{"title":"%d"}' % number + tail)}

    return made


def _doubled(number: int) -> Fields:
    """2^60 ways through a chain of references."""
    chain: Fields = {f"d{i}": {"oneOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(60)}
    return _schema({"title": f"{number}", "$defs": {**chain, "d60": {"type": "string"}}, "$ref": "#/$defs/d0"})


def _circle(number: int) -> Fields:
    rings: Fields = {f"c{i}": {"$ref": f"#/$defs/c{(i + 1) % 9}"} for i in range(9)}
    return _schema({"title": f"{number}", "$defs": rings, "$ref": "#/$defs/c0"})


def _tree(number: int) -> Fields:
    """Recursion that is no fault: each node has sixteen more."""
    children: Fields = {f"n{i}": {"$ref": "#"} for i in range(16)}
    return _schema({"title": f"{number}", "type": "object", "properties": children, "additionalProperties": {"$ref": "#"}})


KINDS: dict[str, Callable[[int], Fields]] = {
    "body of 4 MiB": _large(BODY_BYTES - 4096),
    "body beyond 4 MiB": _large(BODY_BYTES + 4096),
    "schema of 500 KiB": _large(500 << 10),
    "1,000 levels": _levels(1_000),
    "64 levels": _levels(31),
    "doubling references": _doubled,
    "circle of references": _circle,
    "recursive tree": _tree,
    "10^6 enum entries": lambda number: _schema({"enum": [number, *([0] * 10**6)]}),
    "10^4 enum entries": lambda number: _schema({"enum": [f"{number}", *(f"entry {i}" for i in range(10_000))]}),
    "counted pattern": lambda number: {"guided_regex": f"x{number}(a{{1000}}){{1000}}"},
    "exponential automaton": lambda number: {"guided_regex": f"x{number}(a|b)*a(a|b){{500}}c"},
    "exponential pattern in a schema": lambda number: _schema(
        {"type": "string", "title": f"{number}", "pattern": "^(a|b)*a(a|b){400}(c|d)*c(c|d){400}$"}
    ),
    "catastrophic regex": lambda number: {"guided_regex": f"x{number}((a+)+)+(([a-z]+)*[a-z]+)*b"},
    "length of 10^9": lambda number: _schema({"title": f"{number}", "minLength": 10**9, "maxLength": 10**9 + 1}),
}


def body_of(fields: Fields) -> bytes:
    return msgspec.json.encode({"prompt": "hi", "max_tokens": 1, **fields})


def posted(url: str, body: bytes) -> tuple[int, str]:
    """Status, and the code of the error or an empty text. A server may answer before it has all of the body."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=PATIENCE_S)
    with contextlib.closing(connection):
        connection.putrequest("POST", "/v1/completions")
        connection.putheader("Content-Type", "application/json")
        connection.putheader("Content-Length", str(len(body)))
        connection.endheaders()
        # One that is too large is refused by its length, and what was sent of it would make the system drop the answer.
        if len(body) <= BODY_BYTES or not select.select([connection.sock], [], [], REFUSAL_S)[0]:
            connection.send(body)
        with connection.getresponse() as response:
            text = response.read()
            return response.status, "" if response.status == 200 else str(json.loads(text)["error"]["code"])


# ── what is measured ─────────────────────────────────────────────────────────────────────────────────────────────────────


class SchemaFigures(msgspec.Struct, frozen=True):
    kind: str
    body_bytes: int
    statuses: tuple[int, int]
    """Cold and warm."""
    codes: tuple[str, str]
    cold_s: float
    warm_s: float
    front_end_mib: float
    compiler_mib: float


class HostileSchemasReport(Report, kw_only=True):
    model: str
    idle_compiler_mib: float = 0.0
    """Of the process that compiles, before a constraint was asked for."""
    figures: list[SchemaFigures] = msgspec.field(default_factory=list)


@dataclass(slots=True)
class _PeakMemory:
    """The largest resident sizes seen, in KiB."""

    pid: int
    front_end: int = 0
    compiler: int = 0
    over: threading.Event = field(default_factory=threading.Event)

    def look(self) -> None:
        self.front_end = max(self.front_end, _peak_kib(self.pid))
        self.compiler = max([self.compiler, *map(_peak_kib, compilers_of(self.pid))])

    def _watch(self) -> None:
        while not self.over.wait(LOOK_S):
            self.look()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        watch = threading.Thread(target=self._watch)
        watch.start()
        try:
            yield
        finally:
            self.over.set()
            watch.join()
            self.look()


def compilers_of(pid: int) -> list[int]:
    """Processes that compile constraints for this front end."""
    found = []
    for child in map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()):
        with contextlib.suppress(OSError):  # it may end while we look
            if WORKER in Path(f"/proc/{child}/cmdline").read_bytes():
                found.append(child)
    return found


def _peak_kib(pid: int) -> int:
    with contextlib.suppress(OSError, IndexError):
        return int(Path(f"/proc/{pid}/status").read_text().split("VmHWM:")[1].split()[0])
    return 0


def _timed(url: str, body: bytes) -> tuple[float, int, str]:
    began_s = time.perf_counter()
    status, code = posted(url, body)
    return time.perf_counter() - began_s, status, code


def measured(kind: str, model: Sequence[str]) -> SchemaFigures:
    bodies = [body_of(KINDS[kind](number)) for number in (1, 2)]
    with serving("serve", "--port", "0", *model) as (child, url):
        memory = _PeakMemory(child.pid)
        with memory.watching():
            cold_s, cold_status, cold_code = _timed(url, bodies[0])
            warm_s, warm_status, warm_code = _timed(url, bodies[1])
    return SchemaFigures(
        kind=kind,
        body_bytes=len(bodies[0]),
        statuses=(cold_status, warm_status),
        codes=(cold_code, warm_code),
        cold_s=cold_s,
        warm_s=warm_s,
        front_end_mib=memory.front_end / 1024,
        compiler_mib=memory.compiler / 1024,
    )


def idle_compiler_mib(model: Sequence[str], patience_s: float = PATIENCE_S) -> float:
    """Resident size of the process that waits for the first constraint; 0 where there is none."""
    with serving("serve", "--port", "0", *model) as (child, _):
        deadline_s, last = time.monotonic() + patience_s, -1
        while time.monotonic() < deadline_s:
            sizes = [_resident_kib(pid) for pid in compilers_of(child.pid)]
            if sizes and sizes[0] == last:
                return last / 1024
            last = sizes[0] if sizes else -1
            time.sleep(1.0)
    return 0.0


def _resident_kib(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 1024


def judged(row: SchemaFigures) -> list[str]:
    found = [f"{row.kind}: status {status}" for status in row.statuses if status not in STATUSES]
    for name, seconds in (("cold", row.cold_s), ("warm", row.warm_s)):
        if seconds > ANSWER_S_MAX:
            found.append(f"{row.kind}: {seconds:.2f} s {name}, limit {ANSWER_S_MAX:g}")
    for name, mib, most in (
        ("front end", row.front_end_mib, FRONT_END_MIB_MAX),
        ("compiler", row.compiler_mib, COMPILER_MIB_MAX),
    ):
        if mib > most:
            found.append(f"{row.kind}: the {name} held {mib:.0f} MiB, limit {most}")
    return found


def run_hostile_schemas(kinds: Sequence[str], model: Sequence[str], progress: Progress) -> HostileSchemasReport:
    report, loads = HostileSchemasReport(model=" ".join(model)), []
    progress.doing("a server that is asked for nothing")
    report.idle_compiler_mib = idle_compiler_mib(model)
    for kind in kinds:
        progress.doing(kind)
        loads.append(other_load(1.0))
        report.figures.append(measured(kind, model))
        row = report.figures[-1]
        progress.say(f"{kind}: {row.statuses}, {row.cold_s:.2f} s, {row.warm_s:.2f} s  [{shown_load(loads[-1])}]")
        progress.done()
    report.notes = notes_on_other_load(loads)
    report.failures = [text for row in report.figures for text in judged(row)]
    return report


def show(console: Console, report: HostileSchemasReport) -> None:
    columns = (
        ("schema", lambda row: row.kind),
        ("body KiB", lambda row: f"{row.body_bytes / 1024:,.0f}"),
        ("status", lambda row: " ".join(dict.fromkeys(map(str, row.statuses)))),
        ("code", lambda row: " ".join(dict.fromkeys(row.codes))),
        ("cold s", lambda row: f"{row.cold_s:.2f}"),
        ("warm s", lambda row: f"{row.warm_s:.2f}"),
        ("front end MiB", lambda row: f"{row.front_end_mib:.0f}"),
        ("compiler MiB", lambda row: f"{row.compiler_mib:.0f}"),
    )
    console.print(table_of(f"Schemas made to be dear, {report.model}", columns, report.figures))
    console.print(f"An idle process that compiles holds {report.idle_compiler_mib:.0f} MiB.")
    for line in (*report.notes, *report.failures):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


Model = Annotated[str, typer.Option(help="Options that name the model, such as a built-in name.")]
Only = Annotated[list[str] | None, typer.Option("--kind", help="Only this kind of schema; may be repeated.")]


def hostile_schemas(model: Model = SCRIPTED, kind: Only = None, json_file: JsonIfGiven = None) -> None:
    """Ask new servers for schemas that are made to be dear, and measure how soon they answer.

    Exit code 1 when an answer takes more than two seconds or is an error of the server, or a process held too much memory.
    """

    def prepare(progress: Progress) -> Experiment[HostileSchemasReport]:
        chosen = kind or list(KINDS)
        if unknown := [name for name in chosen if name not in KINDS]:
            raise BadBenchmarkOptions(f"unknown: {', '.join(unknown)}; there are {', '.join(KINDS)}")
        return Experiment(len(chosen), lambda: run_hostile_schemas(chosen, model.split(), progress))

    run_benchmark(prepare, show, json_file)
