"""How many connections there are files for, and what is told where too many are asked for."""

from __future__ import annotations

import resource

import pytest

from baton.node.descriptors import connections_possible, has_descriptors, raise_descriptor_limit
from baton.node.http_server import CONNECTIONS_MAX, CannotServe, http_limits
from baton.node.settings import HttpSettings


@pytest.fixture
def soft_limit(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The limits as the process sees them."""
    limits = [256, 4096]

    def set_limit(_: int, given: tuple[int, int]) -> None:
        limits[:] = given

    monkeypatch.setattr(resource, "getrlimit", lambda _: tuple(limits))
    monkeypatch.setattr(resource, "setrlimit", set_limit)
    return limits


def test_the_soft_limit_is_raised_to_the_hard_one_and_never_lowered(soft_limit: list[int]) -> None:
    limits = soft_limit
    raise_descriptor_limit()
    assert limits == [4096, 4096]
    limits[:] = [resource.RLIM_INFINITY, resource.RLIM_INFINITY]
    raise_descriptor_limit()
    assert limits == [resource.RLIM_INFINITY, resource.RLIM_INFINITY]


@pytest.mark.parametrize(("files", "connections"), [(256, 192), (1024, 768), (20_000, 18_976), (60, 1)])
def test_files_are_kept_for_what_is_no_client(soft_limit: list[int], files: int, connections: int) -> None:
    soft_limit[:] = [files, files]
    assert connections_possible() == connections
    assert http_limits(HttpSettings()).connections == min(connections, CONNECTIONS_MAX)


def test_more_connections_than_files_is_told_at_the_start(soft_limit: list[int]) -> None:
    soft_limit[:] = [256, 256]
    assert http_limits(HttpSettings(max_connections=192)).connections == 192
    with pytest.raises(CannotServe, match=r"--max-connections 193 .*ulimit"):
        http_limits(HttpSettings(max_connections=193))


def test_names_are_checked_without_keys_only() -> None:
    assert http_limits(HttpSettings(allowed_hosts=("Proxy.example",))).hosts == frozenset({"proxy.example"})
    assert http_limits(HttpSettings(api_keys=("k",))).hosts is None


def test_there_are_descriptors_now() -> None:
    assert has_descriptors()
