"""What counts as a valid call of an agent, what fails a conversation, and what is said where npm clients cannot be had."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest

from benchmarks import agent_npm, agents
from benchmarks.agent_npm import COMPLETE, NpmFailed, NpmUnavailable, install, installed, npm_calls
from benchmarks.agent_script import TOOLS, AgentEvent, AgentScript, Asked, Called, ConversationFailed, Dialect, script_for
from benchmarks.agents import (
    AgentClient,
    AgentFleet,
    AgentsReport,
    ConversationFigures,
    MovedSoFar,
    compare,
    hold,
    judge,
    why_invalid,
)

GOOD = '{"title": "start", "tags": ["date"], "urgent": true}'
SCRIPT = script_for("http://127.0.0.1:1", "m", Dialect.OPENAI, False, 2)


def call(number: int = 0, name: str = "note", arguments: str = GOOD, call_id: str = "") -> Called:
    return Called(number, name, arguments, call_id or f"call-{number}")


# ── judging ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_arguments_that_satisfy_the_schema_are_valid() -> None:
    assert why_invalid(call()) is None


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (call(arguments='{"title": "start", "tags": ["date"]'), "call 0"),
        (call(arguments='{"title": "start", "tags": ["date"]}'), "urgent"),
        (call(arguments='{"title": "start", "tags": ["dates"], "urgent": true}'), "dates"),
        (call(arguments=GOOD[:-1] + ', "more": 1}'), "more"),
        (call(name="notes"), "there is no tool 'notes'"),
        (Called(0, "note", GOOD, ""), "has no id"),
    ],
)
def test_other_arguments_are_not(made: Called, why: str) -> None:
    assert why in str(why_invalid(made))


def judged(*made: Called, calls: int = 2) -> ConversationFigures:
    figures = ConversationFigures(client="c", is_streamed=False, calls=calls)
    judge(figures, made)
    return figures


def test_a_conversation_of_valid_calls_has_no_failure() -> None:
    figures = judged(call(0), call(1))
    assert (figures.made, figures.valid, figures.failures) == (2, 2, [])


def test_an_invalid_call_a_missing_one_and_a_repeated_id_are_failures() -> None:
    assert judged(call(0), call(1, arguments="{}")).valid == 1
    assert judged(call(0), call(1, arguments="{}")).failures
    assert judged(call(0)).failures == ["1 calls of 2"]
    assert judged(call(0, call_id="x"), call(1, call_id="x")).failures == ["two calls have the same id"]


def test_calls_are_compared_by_name_and_value_not_by_how_a_client_writes_them() -> None:
    figures = judged(call(0))
    compare(figures, [call(0)], [call(0, arguments=json.dumps(json.loads(GOOD), indent=1), call_id="other")], is_exact=True)
    assert (figures.same, figures.failures[1:]) == (1, [])


def test_another_call_than_the_undisturbed_one_fails_an_exact_model_only() -> None:
    for is_exact in (True, False):
        figures = judged(call(0), calls=1)
        compare(figures, [call(0)], [call(0, arguments=GOOD.replace("start", "other"))], is_exact)
        assert figures.same == 0
        assert bool(figures.failures) == is_exact


def test_the_tools_are_strict_as_openai_demands() -> None:
    for tool in TOOLS:
        jsonschema_rs.validator_for(tool.schema)
        assert tool.schema["additionalProperties"] is False
        assert set(tool.schema["required"]) == set(tool.schema["properties"])


# ── conversations ────────────────────────────────────────────────────────────────────────────────────────────────────────


class QuietFleet(AgentFleet):
    """Nothing is served, and a kill moves an answer after as many tokens as it is told."""

    def __init__(self, tokens: int = 7) -> None:
        super().__init__("http://127.0.0.1:1")
        self._kills = 0
        self._tokens = tokens

    def until_complete(self) -> None: ...

    def moved(self) -> MovedSoFar:
        return MovedSoFar(self._kills, self._kills * self._tokens)

    def kill_serving(self, given_up: Any) -> bool:
        self._kills += 1
        return True


def client_of(*events: AgentEvent | Exception) -> AgentClient:
    def calls_of(_script: AgentScript) -> Iterator[AgentEvent]:
        for event in events:
            if isinstance(event, Exception):
                raise event
            yield event

    return AgentClient("c", Dialect.OPENAI, calls_of)


FOUR = [event for number in range(4) for event in (Asked(number), call(number))]


def test_one_kill_in_the_middle_is_enough_where_it_moved_an_answer() -> None:
    figures, _ = hold(QuietFleet(), "m", client_of(*FOUR), False, 4, kill=True)
    assert (figures.kills, figures.moves, figures.carried, figures.failures) == (1, 1, 7, [])


def test_a_conversation_in_which_nothing_moved_in_mid_answer_shows_nothing() -> None:
    figures, _ = hold(QuietFleet(tokens=0), "m", client_of(*FOUR), False, 4, kill=True)
    assert figures.kills == 2  # tried again in the turn that was left
    assert figures.failures == ["2 kills moved no answer in its middle"]


def test_nothing_is_killed_in_the_undisturbed_conversation() -> None:
    figures, made = hold(QuietFleet(), "m", client_of(*FOUR), False, 4, kill=False)
    assert (figures.kills, len(made), figures.failures) == (0, 4, [])


def test_what_a_client_raises_ends_its_conversation_and_is_told() -> None:
    figures, _ = hold(QuietFleet(), "m", client_of(*FOUR[:3], ConversationFailed("lost")), False, 4, kill=False)
    assert (figures.made, figures.failures) == (1, ["lost"])


# ── npm ──────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def report() -> AgentsReport:
    return AgentsReport(model="m", calls=2)


def nothing(*_: object) -> None: ...


def test_without_node_the_npm_clients_are_left_out_and_the_report_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _program: None)
    made = report()
    assert agents._npm_if_there(made, agents.Progress(nothing, nothing, nothing)) == ()
    assert made.notes == ["npm clients were left out: node is not on the PATH"]
    assert made.failures == []
    with pytest.raises(NpmUnavailable):
        install()


def test_an_installation_that_fails_is_a_failure_and_is_not_taken_for_complete(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("BATON_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(shutil, "which", lambda program: program)
    failed = subprocess.CompletedProcess((), 1, "", "no registry")
    monkeypatch.setattr(agent_npm.subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(NpmFailed, match="no registry"):
        install()
    made = report()
    agents._npm_if_there(made, agents.Progress(nothing, nothing, nothing))
    assert len(made.failures) == 1
    assert installed() is None
    monkeypatch.setattr(agent_npm.subprocess, "run", lambda *_, **__: subprocess.CompletedProcess((), 0, "", ""))
    assert (install() / COMPLETE).exists()
    assert installed() == install()


def test_the_packages_are_pinned_by_version_and_hash() -> None:
    asked = json.loads((agent_npm.SOURCE / "package.json").read_text())["dependencies"]
    locked = json.loads((agent_npm.SOURCE / "package-lock.json").read_text())["packages"]
    assert locked[""]["dependencies"] == asked
    for name, version in asked.items():
        assert locked[f"node_modules/{name}"]["version"] == version
    assert all(entry["integrity"].startswith("sha512-") for name, entry in locked.items() if name)


@pytest.mark.parametrize(
    ("shell", "made", "why"),
    [
        ("""echo '{"asked": 0}'; echo '{"called": 0, "name": "n", "arguments": "{}", "id": "i"}'""", 2, None),
        ("""echo '{"asked": 0}'; echo '{"failed": "500"}'; exit 1""", 0, "500"),
        ("""echo 'Error: no module'; exit 1""", 0, "no module"),
        ("exit 3", 0, "code 3"),
    ],
)
def test_what_node_says_is_read_and_a_failure_of_it_is_one_of_the_conversation(
    shell: str, made: int, why: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    node = tmp_path / "node"
    node.write_text(f"#!/bin/sh\ncat >/dev/null\n{shell}\n")
    node.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    if why is None:
        assert len(list(npm_calls(SCRIPT, tmp_path))) == made
    else:
        with pytest.raises(ConversationFailed, match=why):
            list(npm_calls(SCRIPT, tmp_path))
