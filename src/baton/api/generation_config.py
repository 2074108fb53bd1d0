"""Sampling defaults that an operator gives: a file in place of the model's generation_config.json, and overrides as JSON.

What an operator writes is checked like a request. A file may have other keys, as files of models do; overrides may not.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from pydantic import ValidationError

from baton.api.home_folders import expanded
from baton.api.sampling_defaults import SamplingDefaults
from baton.api.schema import GenerateBody
from baton.core.errors import SetupError

AUTO, NONE = "auto", "none"
FIELDS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
"""Keys of a generation config that are used, and the request fields that they are defaults of."""


class BadGenerationConfig(SetupError):
    """Sampling defaults that cannot be used; the message names the option and the key."""


def given_defaults(choice: str) -> SamplingDefaults | None:
    """What `--generation-config` asks for; None: the model's own."""
    option = "--generation-config"
    if choice == AUTO:
        return None
    if choice == NONE:
        return SamplingDefaults()
    try:
        text = expanded(choice, BadGenerationConfig).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadGenerationConfig(f"{option} is {AUTO}, {NONE} or a JSON file; {choice!r} cannot be read: {error}") from None
    return _checked(_parsed(text, f"{option} {choice}"), f"{option} {choice}")


def overrides(text: str | None) -> SamplingDefaults:
    """The value of `--override-generation-config`."""
    if text is None:
        return SamplingDefaults()
    option = "--override-generation-config"
    content = _parsed(text, option)
    if unknown := sorted(content.keys() - FIELDS.keys()):
        raise BadGenerationConfig(f"{option} has {unknown[0]!r}; it may have {', '.join(FIELDS)}")
    return _checked(content, option)


def _parsed(text: str, where: str) -> dict[str, object]:
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadGenerationConfig(f"{where} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise BadGenerationConfig(f'{where} must be a JSON object, such as {{"temperature": 0.7}}')
    return content


def _checked(content: Mapping[str, object], where: str) -> SamplingDefaults:
    named = {name: value for key, value in content.items() if (name := FIELDS.get(key)) is not None}
    try:
        body = GenerateBody.model_validate(named)
    except ValidationError as error:
        first = error.errors()[0]
        name = next(key for key, field in FIELDS.items() if field == first["loc"][0])
        raise BadGenerationConfig(f"{where}: {name!r}: {first['msg']}") from None
    return SamplingDefaults(
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        min_p=body.min_p,
        repetition_penalty=body.repetition_penalty,
        max_tokens=body.max_tokens,
    )
