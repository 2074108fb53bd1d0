"""Agents through the official clients: each turn is a call, results are fed back, and the serving instance is killed.

The long form is `python -m benchmarks agents`.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from benchmarks.agent_npm import NpmUnavailable, install
from benchmarks.agent_script import Called, Dialect
from benchmarks.agents import PYTHON_CLIENTS, AgentClient, AgentFleet, agent_fleet, compare, hold, npm_clients

CALLS = 3


class Agents:
    """A fleet, and the undisturbed conversation of each dialect."""

    def __init__(self, fleet: AgentFleet, model: str) -> None:
        self._fleet = fleet
        self._model = model
        self._undisturbed: dict[Dialect, list[Called]] = {}

    def check(self, client: AgentClient, is_streamed: bool) -> None:
        if client.dialect not in self._undisturbed:
            figures, made = hold(self._fleet, self._model, client, False, CALLS, kill=False)
            assert figures.failures == []
            self._undisturbed[client.dialect] = made
        figures, made = hold(self._fleet, self._model, client, is_streamed, CALLS, kill=True)
        compare(figures, made, self._undisturbed[client.dialect], is_exact=True)
        assert figures.failures == []
        assert (figures.made, figures.valid, figures.same) == (CALLS, CALLS, CALLS)
        assert figures.kills >= 1
        assert figures.carried >= 1


@pytest.fixture(scope="module")
def agents() -> Iterator[Agents]:
    with agent_fleet("scripted") as (url, model):
        yield Agents(AgentFleet(url), model)


@pytest.fixture(scope="module")
def npm() -> tuple[AgentClient, ...]:
    """Installed the first time, from a lock file."""
    try:
        return npm_clients(install())
    except NpmUnavailable as reason:
        pytest.skip(f"no npm clients: {reason}")


@pytest.mark.slow
@pytest.mark.parametrize("is_streamed", [True, False], ids=["streamed", "whole"])
@pytest.mark.parametrize("client", PYTHON_CLIENTS, ids=lambda client: client.name)
def test_an_agent_goes_on_through_kill_9_with_the_same_calls(agents: Agents, client: AgentClient, is_streamed: bool) -> None:
    agents.check(client, is_streamed)


@pytest.mark.slow
@pytest.mark.parametrize("is_streamed", [True, False], ids=["streamed", "whole"])
@pytest.mark.parametrize("number", range(3), ids=["openai", "responses", "anthropic"])
def test_an_agent_of_npm_goes_on_through_kill_9_with_the_same_calls(
    agents: Agents, npm: tuple[AgentClient, ...], number: int, is_streamed: bool
) -> None:
    agents.check(npm[number], is_streamed)
