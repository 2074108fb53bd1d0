"""Sampling defaults that an operator gives."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.api.generation_config import BadGenerationConfig, given_defaults, overrides
from baton.api.model_text import ModelText
from baton.api.sampling_defaults import SamplingDefaults
from baton.api.settings import ApiSettings
from baton.node.http_server import api_settings
from baton.node.settings import InstanceSettings
from tests.api.conftest import serving
from tests.api.engine import ScriptedEngine


def test_auto_is_the_model_s_own_and_none_is_neutral() -> None:
    assert given_defaults("auto") is None
    assert given_defaults("none") == SamplingDefaults()


def test_a_file_may_have_keys_that_are_not_used(tmp_path: Path) -> None:
    file = tmp_path / "generation.json"
    file.write_text('{"do_sample": true, "temperature": 0.4, "top_k": 30, "max_new_tokens": 99, "eos_token_id": [1, 2]}')
    assert given_defaults(str(file)) == SamplingDefaults(temperature=0.4, top_k=30, max_tokens=99)


def test_overrides_are_json() -> None:
    assert overrides(None) == SamplingDefaults()
    assert overrides('{"temperature": 0, "repetition_penalty": 1.1}') == SamplingDefaults(
        temperature=0.0, repetition_penalty=1.1
    )


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{", "--override-generation-config is not JSON"),
        ("[" * 100_000, "--override-generation-config is not JSON"),
        ("[1]", "must be a JSON object"),
        ('{"temprature": 1}', "has 'temprature'; it may have temperature, top_p"),
        ('{"temperature": 3}', "'temperature': Input should be less than or equal to 2"),
        ('{"max_new_tokens": 0}', "'max_new_tokens': Input should be greater than or equal to 1"),
        ('{"top_k": "5"}', "'top_k': Input should be a valid integer"),
    ],
)
def test_bad_overrides_are_refused_by_name(text: str, told: str) -> None:
    with pytest.raises(BadGenerationConfig) as refused:
        overrides(text)
    assert told in str(refused.value)


def test_a_bad_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(BadGenerationConfig, match="is auto, none or a JSON file; 'greedy' cannot be read"):
        given_defaults("greedy")
    file = tmp_path / "generation.json"
    file.write_text('{"top_p": 0}')
    with pytest.raises(BadGenerationConfig, match=r"generation.json: 'top_p': Input should be greater than 0"):
        given_defaults(str(file))


def test_the_built_in_model_has_defaults_that_a_file_or_none_replaces() -> None:
    built_in = SamplingDefaults(temperature=0.0, max_tokens=256)
    assert api_settings(InstanceSettings(), ("m",)).model_sampling == built_in
    assert api_settings(InstanceSettings(generation_config="none"), ("m",)).model_sampling == SamplingDefaults()
    assert api_settings(InstanceSettings(model="./folder"), ("m",)).model_sampling is None


def test_what_replaces_the_model_s_defaults_leaves_nothing_of_them(engine: ScriptedEngine, text: ModelText) -> None:
    settings = ApiSettings(
        served_model_names=("tiny",),
        model_sampling=SamplingDefaults(top_p=0.5),
        default_sampling=SamplingDefaults(max_tokens=7),
    )
    with serving(engine, text, settings) as running:
        running.chat()
    sampling = engine.groups[0][0].sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (1.0, 0, 0.5)


def test_a_default_length_yields_to_the_request_and_to_the_context(engine: ScriptedEngine, text: ModelText) -> None:
    settings = ApiSettings(served_model_names=("tiny",), default_sampling=SamplingDefaults(max_tokens=300))
    with serving(engine, text, settings) as running:
        assert running.complete(prompt=[1] * 100).status == 200
        assert running.complete(prompt=[1] * 400).status == 200
        assert running.complete(prompt=[1] * 100, max_tokens=2).status == 200
        assert running.complete(prompt=[1] * 100, min_tokens=310).status == 200
        assert running.complete(prompt=[1] * 512).error["code"] == "context_length_exceeded"
    assert [group[0].max_tokens for group in engine.groups] == [300, 112, 2, 310]
