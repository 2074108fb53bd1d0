from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from baton.api.model_text import ModelText, TemplateRefused, load_text
from baton.api.sampling_defaults import SamplingDefaults
from tests.api.tokenizers_made_here import TEMPLATE, byte_level


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    wrapper = PreTrainedTokenizerFast(tokenizer_object=byte_level(), eos_token="<|end|>", model_max_length=8)
    wrapper.chat_template = "{{ eos_token }}" + TEMPLATE
    wrapper.save_pretrained(tmp_path)
    generation = {"eos_token_id": [7, 9], "temperature": 0.3, "top_p": 0.9, "top_k": 40, "do_sample": True}
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": 8}))
    return tmp_path


def test_a_folder_gives_tokenizer_template_ends_and_defaults(folder: Path) -> None:
    text = load_text(folder)
    end = byte_level().token_to_id("<|end|>")
    assert text.eos_ids == {7, 8, 9, end}, "of generation_config, config and tokenizer together"
    assert text.defaults == SamplingDefaults(temperature=0.3, top_p=0.9, top_k=40)
    rendered = text.render_chat([{"role": "user", "content": "hi"}], add_generation_prompt=True, extra={})
    assert rendered == "<|end|><|user|>hi<|end|><|assistant|>"
    assert text.encode("<|end|>hi", add_special_tokens=False) == [end, 104, 105]
    long = "a long text, beyond the length that the folder names"
    assert text.decode(text.encode(long)) == long


def test_while_a_long_text_is_made_tokens_other_threads_run(folder: Path) -> None:
    text, done, naps = load_text(folder), threading.Event(), 0

    def live() -> None:
        nonlocal naps
        while not done.wait(0.001):
            naps += 1

    other = threading.Thread(target=live)
    other.start()
    before = naps
    count = len(text.encode("a long text " * 100_000))
    during = naps - before
    done.set()
    other.join()
    assert count == 1_200_000
    assert during > 20, "in a second that takes"


def test_a_folder_without_generation_config_has_neutral_defaults(folder: Path) -> None:
    (folder / "generation_config.json").unlink()
    assert load_text(folder).defaults == SamplingDefaults()


def test_defaults_that_are_given_go_first_and_zero_is_given() -> None:
    operator = SamplingDefaults(temperature=0.0, top_k=0)
    assert operator.over(SamplingDefaults(temperature=0.7, top_p=0.9, top_k=20)) == SamplingDefaults(0.0, 0.9, 0)


def test_what_a_template_cannot_digest_is_a_refusal() -> None:
    text = ModelText(byte_level(), chat_template="{{ messages[0].content + 1 }}")
    with pytest.raises(TemplateRefused, match="refused the messages"):
        text.render_chat([{"role": "user", "content": "hi"}], True, {})


def test_a_template_runs_in_a_sandbox() -> None:
    text = ModelText(byte_level(), chat_template="{{ messages.__class__.__mro__ }}{{ ''.__class__.__mro__[1]() }}")
    with pytest.raises(TemplateRefused):
        text.render_chat([{"role": "user", "content": "hi"}], True, {})


def test_a_token_that_the_tokenizer_names_is_not_the_clients_to_set() -> None:
    text = ModelText(byte_level(), chat_template="{{ think_token }}", special_tokens={"think_token": "<|end|>"})
    with pytest.raises(TemplateRefused, match="may not set 'think_token'"):
        text.render_chat([{"role": "user", "content": "hi"}], True, {"think_token": "x"})
