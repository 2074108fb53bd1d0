"""Requests whose constraint is being compiled: their ids are taken, and a cancel or a disconnect ends the wait."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from baton.api.model_text import ModelText
from baton.api.settings import ApiSettings
from baton.core.engine.request import Constraint
from tests.api.conftest import Reply, Served, serving
from tests.api.engine import ScriptedEngine
from tests.api.test_lifecycle import opened
from tests.support.waiting import wait_until

ID = {"X-Request-Id": "slow"}
FIELDS = {"guided_regex": "a+"}


class EndlessCompiler:
    """Compiles until it is left."""

    def __init__(self) -> None:
        self.begun = 0
        self.left = 0

    async def compile(self, tenant: str, job: bytes, param: str) -> Constraint | None:
        self.begun += 1
        try:
            await asyncio.Event().wait()
        finally:
            self.left += 1
        return None


@pytest.fixture
def compiler() -> EndlessCompiler:
    return EndlessCompiler()


@pytest.fixture
def compiling(engine: ScriptedEngine, text: ModelText, settings: ApiSettings, compiler: EndlessCompiler) -> Iterator[Served]:
    with serving(engine, text, settings, compiler=compiler) as running:
        yield running


def test_a_request_that_is_compiling_is_cancelled_by_id(
    compiling: Served, compiler: EndlessCompiler, engine: ScriptedEngine
) -> None:
    replies: list[Reply] = []
    thread = threading.Thread(target=lambda: replies.append(compiling.chat(headers=ID, **FIELDS)))
    thread.start()
    wait_until(lambda: compiler.begun == 1)
    assert compiling.call("DELETE", "/v1/requests/slow").status == 200
    thread.join(10)
    assert [choice["finish_reason"] for choice in replies[0].json()["choices"]] == ["abort"]
    wait_until(lambda: compiler.left == 1)
    assert not engine.groups
    assert compiling.chat(headers=ID).status == 200, "the id is free again"


def test_a_second_request_with_the_same_id_is_refused_before_anything_is_compiled(
    compiling: Served, compiler: EndlessCompiler
) -> None:
    with opened(compiling, FIELDS, "X-Request-Id: slow\r\n"):
        wait_until(lambda: compiler.begun == 1)
        assert compiling.chat(headers=ID, **FIELDS).status == 409
        assert compiler.begun == 1


def test_a_client_that_hangs_up_ends_the_wait_for_its_constraint(
    compiling: Served, compiler: EndlessCompiler, engine: ScriptedEngine
) -> None:
    with opened(compiling, FIELDS, "X-Request-Id: slow\r\n"):
        wait_until(lambda: compiler.begun == 1)
    wait_until(lambda: compiler.left == 1)
    assert not engine.groups
    assert compiling.chat(headers=ID).status == 200
