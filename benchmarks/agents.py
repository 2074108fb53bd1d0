"""Agents under kill -9: conversations of many tool calls with the official clients, against `baton up` with two instances.

    1. undisturbed: one conversation a dialect, nothing is killed; its calls are what the others are compared with
    2. for each client, streamed and whole: the same conversation; in the middle of it, while an answer is being generated,
       the instance that serves it is killed with kill -9, and `baton up` starts another
    3. judged: every turn is one call, its arguments parse and are valid for the tool's schema, the kill moved an answer with
       tokens that had come, and with an exact model the calls are those of the undisturbed conversation

The default model is tiny, random and exact (float64), with a chat template that tells of tools, calls and results. Owns the
fleet. npm clients need node and npm; without them they are left out, and the report says so.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated

import jsonschema_rs
import msgspec
import typer
from rich.console import Console

from baton.bench.chaos_signals import is_instance
from baton.bench.child_processes import ChildFailed
from baton.bench.tiny_model import make_tiny
from benchmarks.agent_clients import anthropic_calls, openai_calls
from benchmarks.agent_npm import NpmFailed, NpmUnavailable, install, npm_calls
from benchmarks.agent_script import (
    SCHEMAS,
    AgentEvent,
    AgentScript,
    Asked,
    Called,
    ConversationFailed,
    Dialect,
    script_for,
)
from benchmarks.health import get, instances, serving, until
from benchmarks.options import JsonIfGiven
from benchmarks.runner import Columns, Experiment, Progress, Report, print_remarks, run_benchmark, table_of

TINY, SCRIPTED = "tiny", "scripted"
EXACT = (TINY, SCRIPTED)
CONTEXT_TOKENS = 32_768
"""Of the tiny model: 50 calls and their results have about 15,000 bytes."""
INSTANCES = 2
KILL_AFTER_S = 0.2
"""From the moment at which an instance is seen to serve until it is killed: some tokens of its answer have come by then."""
KILLS_MAX = 3
"""Where a kill came before the first token of an answer or after the last, another is tried in the next turn."""
POLL_S = 0.01
STEP_MS = "20"
"""Of the scripted executor: an answer must still be in its middle when an instance has said that it serves."""
SHOWN_FAILURES = 5
CHAT_TEMPLATE = (
    "{% if tools %}system: <tools>{{ tools | tojson }}</tools>\n{% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)

CallCount = Annotated[int, typer.Option("--calls", min=2, max=200, help="Tool calls of a conversation.")]
Model = Annotated[str, typer.Option(help="tiny (made on the spot), scripted, or as for baton up.")]
Clients = Callable[[AgentScript], Iterator[AgentEvent]]


@dataclass(frozen=True, slots=True)
class AgentClient:
    name: str
    dialect: Dialect
    calls_of: Clients


PYTHON_CLIENTS = (
    AgentClient("openai (Python)", Dialect.OPENAI, openai_calls),
    AgentClient("anthropic (Python)", Dialect.ANTHROPIC, anthropic_calls),
)


def npm_clients(folder: Path) -> tuple[AgentClient, ...]:
    calls_of = partial(npm_calls, folder=folder)
    return (
        AgentClient("openai (npm)", Dialect.OPENAI, calls_of),
        AgentClient("openai (npm), responses", Dialect.RESPONSES, calls_of),
        AgentClient("@anthropic-ai/sdk (npm)", Dialect.ANTHROPIC, calls_of),
    )


class ConversationFigures(msgspec.Struct, kw_only=True):
    client: str
    is_streamed: bool
    calls: int
    """Asked for."""
    made: int = 0
    valid: int = 0
    """Of these, those whose arguments parse and satisfy the schema of their tool."""
    same: int | None = None
    """Of these, those that are the undisturbed conversation's; None for that one itself."""
    kills: int = 0
    moves: int = 0
    carried: int = 0
    """Tokens that had come before these moves."""
    failures: list[str] = msgspec.field(default_factory=list)
    seconds: float = 0.0


class AgentsReport(Report, kw_only=True):
    model: str
    calls: int
    conversations: list[ConversationFigures] = msgspec.field(default_factory=list)


def agents(calls: CallCount = 50, model: Model = TINY, json: JsonIfGiven = None) -> None:
    """Have conversations of tool calls with the official clients while the instance that serves is killed."""
    run_benchmark(partial(_prepared, calls, model), show, json)


def _prepared(calls: int, model: str, progress: Progress) -> Experiment[AgentsReport]:
    def run() -> AgentsReport:
        report = AgentsReport(model=model, calls=calls)
        clients = (*PYTHON_CLIENTS, *_npm_if_there(report, progress))
        progress.doing("starting the fleet")
        with agent_fleet(model) as (url, name):
            report.conversations = converse(AgentFleet(url), name, clients, calls, model in EXACT, progress)
        for row in report.conversations:
            about = f"{row.client}, {_mode(row)}"
            report.failures += [f"{about}: {failure}" for failure in row.failures[:SHOWN_FAILURES]]
        return report

    return Experiment(None, run)


def _npm_if_there(report: AgentsReport, progress: Progress) -> tuple[AgentClient, ...]:
    progress.doing("installing the npm clients")
    try:
        return npm_clients(install())
    except NpmUnavailable as reason:
        report.notes.append(f"npm clients were left out: {reason}")
    except NpmFailed as reason:
        report.failures.append(f"npm clients could not be installed: {reason}")
    return ()


# ── the fleet ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@contextlib.contextmanager
def agent_fleet(model: str, *more: str) -> Iterator[tuple[str, str]]:
    """`baton up` with two instances: its address and the name of its model."""
    with tempfile.TemporaryDirectory(prefix="baton-agents-") as folder:
        words = _model_words(model, Path(folder) / TINY)
        up = ("up", "--router-port", "0", "--mixed", str(INSTANCES), "--restart-delay-max", "0.2", *words, *more)
        with serving(*up) as (_, url):
            name: str = get(f"{url}/v1/models").json()["data"][0]["id"]
            yield url, name


def _model_words(model: str, folder: Path) -> tuple[str, ...]:
    if model == SCRIPTED:
        return ("--executor", "scripted", "--step-ms", STEP_MS)
    if model != TINY:
        return (model,)
    make_tiny(folder, CONTEXT_TOKENS)
    config = folder / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"chat_template": CHAT_TEMPLATE}))
    return (str(folder), "--device", "cpu", "--dtype", "float64", "--threads", "1", "--kv-memory", "128M")


@dataclass(frozen=True, slots=True)
class MovedSoFar:
    """Since the router started."""

    answers: int = 0
    """Choices that went on elsewhere because their instance was lost."""
    tokens: int = 0
    """Generated tokens that went with them."""

    def since(self, before: MovedSoFar) -> MovedSoFar:
        return MovedSoFar(self.answers - before.answers, self.tokens - before.tokens)


def _count(line: str) -> int:
    """The value on a line of metrics."""
    return int(float(line.rsplit(" ", 1)[1]))


class AgentFleet:
    """What a router says of its instances, and kill -9 of the one that serves."""

    def __init__(self, url: str) -> None:
        self.url = url

    def until_complete(self) -> None:
        until(lambda: len(instances(self.url)) == INSTANCES, "both instances ready")

    def moved(self) -> MovedSoFar:
        lines = get(f"{self.url}/metrics").body.splitlines()
        lost = [line for line in lines if line.startswith("baton_retries_total") and 'cause="lost"' in line]
        carried = [line for line in lines if line.startswith("baton_moved_tokens_total")]
        return MovedSoFar(sum(map(_count, lost)), sum(map(_count, carried)))

    def kill_serving(self, given_up: threading.Event) -> bool:
        """Kill the instance that generates an answer, as soon as one does; False where none did before `given_up`."""
        while not given_up.is_set():
            for name, one in instances(self.url).items():
                if one["open"] and one["ledger"]["running"] and is_instance(one["pid"], name):
                    time.sleep(KILL_AFTER_S)
                    os.kill(one["pid"], signal.SIGKILL)
                    return True
            time.sleep(POLL_S)
        return False


@dataclass(slots=True)
class MidAnswerKill:
    """Kills the serving instance from a turn on, in a thread beside the client, until an answer has moved in its middle."""

    fleet: AgentFleet
    from_turn: int
    before: MovedSoFar
    """When the conversation began."""
    kills: int = 0
    _given_up: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def asked(self, number: int) -> None:
        if number < self.from_turn or self.kills >= KILLS_MAX or self.moved().tokens:
            return
        self.fleet.until_complete()
        self._given_up.clear()
        self._thread = threading.Thread(target=self._kill, daemon=True)
        self._thread.start()

    def _kill(self) -> None:
        self.kills += self.fleet.kill_serving(self._given_up)

    def answered(self) -> None:
        """The answer has come: there is nothing left to kill in this turn."""
        if self._thread is not None:
            self._given_up.set()
            self._thread.join()
            self._thread = None

    def moved(self) -> MovedSoFar:
        return self.fleet.moved().since(self.before)


# ── conversations ────────────────────────────────────────────────────────────────────────────────────────────────────────


def converse(
    fleet: AgentFleet, model: str, clients: Sequence[AgentClient], calls: int, is_exact: bool, progress: Progress
) -> list[ConversationFigures]:
    """An undisturbed conversation a dialect, then two of each client in which an instance is killed."""
    found: list[ConversationFigures] = []
    undisturbed: dict[Dialect, list[Called]] = {}
    for client in clients:
        if client.dialect not in undisturbed:
            progress.doing(f"{client.name}: undisturbed")
            figures, undisturbed[client.dialect] = hold(fleet, model, client, False, calls, kill=False)
            found.append(figures)
    for client in clients:
        for is_streamed in (True, False):
            progress.doing(f"{client.name}: {'streamed' if is_streamed else 'whole'}")
            figures, made = hold(fleet, model, client, is_streamed, calls, kill=True)
            compare(figures, made, undisturbed[client.dialect], is_exact)
            progress.say(f"{figures.client}, {_mode(figures)}: {figures.valid} of {calls} in {figures.seconds:.0f} s")
            found.append(figures)
    return found


def hold(
    fleet: AgentFleet, model: str, client: AgentClient, is_streamed: bool, calls: int, kill: bool
) -> tuple[ConversationFigures, list[Called]]:
    """One conversation, with a kill in the middle of it or without."""
    fleet.until_complete()
    figures = ConversationFigures(client=client.name, is_streamed=is_streamed, calls=calls)
    killing = MidAnswerKill(fleet, calls // 2 if kill else calls, fleet.moved())
    made, began_s = list[Called](), time.monotonic()
    try:
        for event in client.calls_of(script_for(fleet.url, model, client.dialect, is_streamed, calls)):
            if isinstance(event, Asked):
                killing.asked(event.number)
            else:
                killing.answered()
                made.append(event)
    except (ConversationFailed, ChildFailed) as error:
        figures.failures.append(str(error))
    killing.answered()
    figures.seconds = time.monotonic() - began_s
    moved = killing.moved()
    figures.kills, figures.moves, figures.carried = killing.kills, moved.answers, moved.tokens
    judge(figures, made)
    if kill and not figures.carried:
        figures.failures.append(f"{figures.kills} kills moved no answer in its middle")
    return figures, made


def judge(figures: ConversationFigures, made: Sequence[Called]) -> None:
    """Count the calls that are valid, and say what is wrong with the others."""
    wrong = [why for call in made if (why := why_invalid(call)) is not None]
    if len({call.id for call in made}) != len(made):
        wrong.append("two calls have the same id")
    figures.made = len(made)
    figures.valid = sum(why_invalid(call) is None for call in made)
    figures.failures += wrong
    if figures.made != figures.calls and not figures.failures:
        figures.failures.append(f"{figures.made} calls of {figures.calls}")


def why_invalid(call: Called) -> str | None:
    """Why a call is not one of a tool with arguments that satisfy its schema; None where it is."""
    about = f"call {call.number}"
    if call.name not in SCHEMAS:
        return f"{about}: there is no tool {call.name!r}"
    if not call.id:
        return f"{about} has no id"
    try:
        jsonschema_rs.validate(SCHEMAS[call.name], json.loads(call.arguments))
    except ValueError as error:  # of JSON and of the schema
        return f"{about}: {call.arguments!r}: {str(error).splitlines()[0]}"
    return None


def compare(figures: ConversationFigures, made: Sequence[Called], undisturbed: Sequence[Called], is_exact: bool) -> None:
    """Count the calls that the undisturbed conversation made too. With an exact model another one is a failure."""
    pairs = zip(made, undisturbed, strict=False)
    figures.same = sum(_meaning(one) == _meaning(other) for one, other in pairs)
    if is_exact and figures.same < len(made):
        figures.failures.append(f"{len(made) - figures.same} calls are not those of the undisturbed conversation")


def _meaning(call: Called) -> tuple[str, object]:
    """Clients write arguments that they have parsed in their own way; ids are of a request."""
    try:
        return call.name, json.loads(call.arguments)
    except ValueError:
        return call.name, call.arguments


# ── what is shown ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _mode(row: ConversationFigures) -> str:
    return ("streamed" if row.is_streamed else "whole") + (", undisturbed" if row.same is None else "")


COLUMNS: Columns[ConversationFigures] = (
    ("client", lambda row: row.client),
    ("mode", _mode),
    ("calls", lambda row: f"{row.made} of {row.calls}"),
    ("valid", lambda row: str(row.valid)),
    ("as undisturbed", lambda row: "" if row.same is None else str(row.same)),
    ("kills", lambda row: str(row.kills)),
    ("moves", lambda row: str(row.moves)),
    ("tokens before", lambda row: str(row.carried) if row.moves else ""),
    ("failures", lambda row: str(len(row.failures))),
    ("seconds", lambda row: f"{row.seconds:.0f}"),
)
LEGEND = (
    "Valid: the arguments parse and satisfy the schema of the tool. "
    "Moves: answers that went on at another instance, after the tokens of the next column."
)


def show(console: Console, report: AgentsReport) -> None:
    title = f"conversations of {report.calls} tool calls, {report.model}, baton up with {INSTANCES} instances"
    console.print(table_of(title, COLUMNS, report.conversations))
    print_remarks(console, report, LEGEND)
