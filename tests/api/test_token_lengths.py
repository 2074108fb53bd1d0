"""The least number of tokens is never more than the real one, for any text; else a prompt that fits would be refused."""

from __future__ import annotations

import time

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

from baton.api.model_text import ModelText, TextTooLong
from baton.api.settings import ApiSettings
from baton.api.token_lengths import token_lengths
from tests.api.conftest import Served, serving
from tests.api.engine import ScriptedEngine
from tests.api.tokenizers_made_here import byte_fallback, byte_level, metaspace

QUIET = settings(max_examples=60, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))


def normalised(normaliser: normalizers.Normalizer) -> Tokenizer:
    tokenizer = byte_level()
    tokenizer.normalizer = normaliser
    return tokenizer


def lacking_bytes() -> Tokenizer:
    """As the built-in model's: a few bytes have no token, and vanish."""
    whole = byte_level(())
    kept = [word for word, number in whole.get_vocab(with_added_tokens=False).items() if number not in (4, 6, 0xF1, 97)]
    tokenizer = Tokenizer(models.BPE({word: number for number, word in enumerate(kept)}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = whole.pre_tokenizer, whole.decoder
    return tokenizer


def stripping() -> Tokenizer:
    tokenizer = byte_level()
    tokenizer.add_special_tokens([AddedToken("<|s|>", lstrip=True, rstrip=True, normalized=False)])
    return tokenizer


KNOWN = {
    "bytes": byte_level(),
    "fallback": byte_fallback(),
    "nfc": normalised(normalizers.NFC()),
    "nfkc": normalised(normalizers.NFKC()),
    "lower": normalised(normalizers.Sequence([normalizers.NFD(), normalizers.Lowercase()])),
    "replace": normalised(normalizers.Replace("ab", "c")),
    "lacking": lacking_bytes(),
    "stripping": stripping(),
}
TEXT = st.one_of(
    st.text(max_size=200),
    st.lists(st.sampled_from(["hello", " world", "你好", "<|s|>", "<|end|>", " ", "\u3000", "ab", "\u0301", "e", "ᄀ", "ᅡ",
                              "ᆨ", "\U0001d41e", "\x04", "\U000f1f1f", "a"]), max_size=60).map("".join),
)  # fmt: skip


@pytest.mark.parametrize("name", KNOWN)
@QUIET
@given(text=TEXT)
@example(text="\x04\x06aaa")
@example(text="   <|s|>" + " \u3000" * 80)
@example(text="\U0001d41e" * 50)
def test_no_text_has_fewer_tokens_than_its_bytes_tell(name: str, text: str) -> None:
    lengths = token_lengths(KNOWN[name])
    assert lengths is not None
    assert lengths.least_tokens([text]) <= len(ModelText(KNOWN[name]).encode(text))


def white_space_dropping() -> Tokenizer:
    tokenizer = byte_level()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.ByteLevel()])
    return tokenizer


@pytest.mark.parametrize(
    "tokenizer",
    [
        metaspace(),
        white_space_dropping(),
        normalised(normalizers.StripAccents()),
        normalised(normalizers.Replace("a", "")),
        Tokenizer(models.BPE({"<unk>": 0, "a": 1}, [], unk_token="<unk>", fuse_unk=True)),
    ],
)
def test_where_text_may_vanish_nothing_is_refused_by_its_bytes(tokenizer: Tokenizer) -> None:
    assert token_lengths(tokenizer) is None
    ModelText(tokenizer).check_length(["a" * 100_000], 1)


@pytest.fixture
def counting(text: ModelText) -> tuple[ModelText, list[str]]:
    """A text that notes what it is asked to encode."""
    encoded: list[str] = []

    class Counting(ModelText):
        def encode(self, text: str, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
            encoded.append(text)
            return super().encode(text, add_special_tokens, parse_special)

    return Counting(text._tokenizer, chat_template=text._chat_template, eos_ids=text.eos_ids), encoded


BYTES = 13 * 512
"""The longest token of this tokenizer × the context of the engine here."""


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "x" * (BYTES + 1)},
        {"prompt": ["fits", "x" * (BYTES + 1)]},
        {"prompt": "x" * (13 * 412 + 1), "max_tokens": 100},
        {"messages": [{"role": "user", "content": "x" * (BYTES // 2)}] * 3},
        {"messages": [{"role": "user", "content": ""}] * 513},
    ],
)
def test_what_cannot_fit_is_refused_before_it_is_encoded(
    body: dict[str, object], engine: ScriptedEngine, counting: tuple[ModelText, list[str]]
) -> None:
    text, encoded = counting
    field = "prompt" if "prompt" in body else "messages"
    path = "/v1/completions" if field == "prompt" else "/v1/chat/completions"
    with serving(engine, text, ApiSettings(("tiny",))) as served:
        reply = served.call("POST", path, body)
    assert reply.status == 400
    assert (reply.error["code"], reply.error["param"]) == ("context_length_exceeded", field)
    assert f"The context has 512 tokens; '{field}' has at least " in reply.error["message"]
    assert not encoded


def test_what_may_fit_is_encoded_and_counted(served: Served) -> None:
    reply = served.complete(prompt="x" * 600)
    assert reply.error["message"] == "The context has 512 tokens; 'prompt' has 600 and the answer at least 1"
    assert served.complete(prompt="hello" * 511, max_tokens=1).status == 200


def test_tokenize_takes_more_than_a_context_and_not_more_than_a_megabyte(served: Served) -> None:
    assert served.call("POST", "/tokenize", {"prompt": "x" * 100_000}).json()["count"] == 100_000
    for body in ({"prompt": "é" * (1 << 19) + "x"}, {"messages": [{"role": "user", "content": "x" * ((1 << 20) + 1)}]}):
        reply = served.call("POST", "/tokenize", body)
        assert (reply.status, reply.error["code"]) == (400, "request_too_large")


def test_four_megabytes_are_refused_in_milliseconds(text: ModelText) -> None:
    prompt = "a b" * 1_390_000
    begun = time.perf_counter()
    with pytest.raises(TextTooLong):
        text.check_length([prompt], 2912)
    assert time.perf_counter() - begun < 0.3
