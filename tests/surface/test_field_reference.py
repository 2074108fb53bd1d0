"""What the reference says of request fields is what the bodies do with them."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from baton.api.errors import ApiError
from baton.api.messages.body import CountTokensBody
from baton.api.paths import CHAT_PATH, COMPLETION_PATH, COUNT_TOKENS_PATH, MESSAGES_PATH, RESPONSES_PATH
from baton.api.responses_api.body import ResponsesBody
from baton.api.schema import INTERNAL, RequestBody, parse
from baton.cli.field_meanings import MEANINGS, MEANINGS_AT
from baton.cli.reference_fields import BODIES, field_rows, fields_page, ignored_fields, refused_fields

TURN = {"role": "user", "content": "hello"}
LEAST = {
    CHAT_PATH: {"messages": [TURN]},
    COMPLETION_PATH: {"prompt": "hello"},
    RESPONSES_PATH: {"input": "hello"},
    MESSAGES_PATH: {"messages": [TURN], "max_tokens": 1},
    COUNT_TOKENS_PATH: {"messages": [TURN]},
    "/tokenize": {"prompt": "hello"},
    "/detokenize": {"tokens": [1]},
}
"""The smallest body of each endpoint."""


def taken(endpoint: str, **fields: object) -> RequestBody:
    body = parse(json.dumps(LEAST[endpoint] | fields).encode(), BODIES[endpoint])
    if isinstance(body, ResponsesBody | CountTokensBody):
        body.as_chat()
    return body


def refusal(endpoint: str, name: str, value: object) -> ApiError:
    with pytest.raises(ApiError) as raised:
        taken(endpoint, **{name: value})
    return raised.value


def at_each(named: str) -> list[tuple[str, str]]:
    return list(_at_each(named))


def _at_each(named: str) -> Iterator[tuple[str, str]]:
    for endpoint, kind in BODIES.items():
        match named:
            case "ignored":
                yield from ((endpoint, name) for name in ignored_fields(kind))
            case "refused":
                yield from ((endpoint, name) for name in refused_fields(kind))
            case "told to be null":
                yield from ((endpoint, row.path) for row in field_rows(endpoint) if row.is_refused and "." not in row.path)


@pytest.mark.parametrize("endpoint", BODIES)
def test_the_fields_that_are_needed_make_a_body(endpoint: str) -> None:
    assert {row.path for row in field_rows(endpoint) if row.is_required and "." not in row.path} <= LEAST[endpoint].keys()
    taken(endpoint)


@pytest.mark.parametrize(("endpoint", "name"), at_each("ignored"))
def test_what_is_said_to_be_ignored_changes_nothing(endpoint: str, name: str) -> None:
    assert taken(endpoint, **{name: "anything"}) == taken(endpoint)


@pytest.mark.parametrize(("endpoint", "name"), at_each("refused"))
def test_what_is_said_to_be_refused_is_unless_it_asks_for_nothing(endpoint: str, name: str) -> None:
    error = refusal(endpoint, name, "something")
    assert (error.status, error.code, error.param) == (400, "unsupported_parameter", name)
    for value in refused_fields(BODIES[endpoint])[name]:
        taken(endpoint, **{name: value})


@pytest.mark.parametrize(("endpoint", "name"), at_each("told to be null"))
def test_what_must_be_null_is_refused_otherwise(endpoint: str, name: str) -> None:
    assert refusal(endpoint, name, "something").code == "unsupported_parameter"
    taken(endpoint, **{name: None})


@pytest.mark.parametrize(("name", "value"), [("truncation", "auto"), ("background", True), ("top_logprobs", 1)])
def test_values_that_are_said_to_be_refused_are(name: str, value: object) -> None:
    assert refusal(RESPONSES_PATH, name, value).code == "unsupported_parameter"


@pytest.mark.parametrize("name", sorted(INTERNAL))
def test_fields_of_routers_are_refused_from_clients(name: str) -> None:
    assert f"`{name}`" in fields_page("")
    for endpoint in BODIES:
        assert refusal(endpoint, name, None).code == "unsupported_parameter"


def test_every_field_has_a_meaning_and_every_meaning_a_field() -> None:
    paths = {(endpoint, row.path) for endpoint in BODIES for row in field_rows(endpoint)}
    assert {path for _, path in paths if "." not in path} <= MEANINGS.keys()
    assert MEANINGS.keys() <= {path for _, path in paths}
    assert MEANINGS_AT.keys() <= paths
