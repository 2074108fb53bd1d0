"""The app is what its OpenAPI schema says: generated requests, good and bad, get only what is declared."""

from __future__ import annotations

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, settings
from schemathesis import Case
from schemathesis.checks import not_a_server_error
from schemathesis.schemas import BaseSchema
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

from baton.api.app import create_app
from baton.api.model_text import ModelText
from baton.api.settings import ApiSettings
from baton.core.errors import Refusal, RefusalCode
from baton.core.handover.faults import PdCode, PdFault, PdStage
from tests.api.engine import ScriptedEngine
from tests.api.tokenizers_made_here import TEMPLATE, byte_level

CHECKS = (
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    negative_data_rejection,
    unsupported_method,
)

TEXT = ModelText(byte_level(), chat_template=TEMPLATE, eos_ids=[300])
ENGINE = ScriptedEngine(lambda _: [104, 105], vocabulary=320)
LEAVING = ScriptedEngine(lambda _: [104, 105], vocabulary=320)
LEAVING.fault = lambda _: PdFault(PdCode.PREEMPTED, PdStage.DECODE, "preempted")
MISDIRECTED = ScriptedEngine(lambda _: [], vocabulary=320)
MISDIRECTED.refusal = Refusal(RefusalCode.WRONG_ROLE, "this instance prefills for others")


def declared(engine: ScriptedEngine, every_bound: bool = False) -> BaseSchema:
    """`every_bound`: not only drawn requests, but thousands more that walk along the bounds of every field."""
    made = schemathesis.openapi.from_asgi("/openapi.json", create_app(engine, TEXT, ApiSettings(("tiny",))))
    made.config.phases.coverage.enabled = every_bound
    return made


schema, bounds = declared(ENGINE), declared(ENGINE, every_bound=True)
misdirected, leaving = declared(MISDIRECTED), declared(LEAVING)


def generated(examples: int) -> settings:
    return settings(
        max_examples=examples,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.explicit, Phase.generate],
    )


@schema.parametrize()
@generated(12)
def test_generated_requests_get_what_is_declared(case: Case) -> None:
    case.call_and_validate(checks=list(CHECKS))


@pytest.mark.slow
@bounds.parametrize()
@generated(40)
def test_so_do_those_along_the_bounds_of_every_field(case: Case) -> None:
    case.call_and_validate(checks=list(CHECKS))


@leaving.include(path_regex="/completions$").parametrize()
@generated(12)
def test_so_do_those_whose_attempt_ends_early(case: Case) -> None:
    case.call_and_validate(checks=list(CHECKS))


@misdirected.include(path_regex="/completions$").parametrize()
@generated(10)
def test_so_do_those_at_an_instance_of_the_wrong_role(case: Case) -> None:
    case.call_and_validate(checks=list(CHECKS))
