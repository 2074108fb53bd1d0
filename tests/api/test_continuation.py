"""Answers that another instance began, continued for a router that proves that it holds the cluster key."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import httpx2 as httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.api.engine import StreamEnd, TokenBurst
from baton.api.model_text import ModelText
from baton.api.settings import ApiSettings
from baton.api.stop_strings import StopScanner
from baton.api.text_reader import ChoiceReader
from baton.core.engine.request import FinishReason, Submission
from baton.core.handover.faults import PdCode, PdFault, PdStage
from baton.wire.keyfile import key_of_text
from baton.wire.request_proof import HEADER, ProofChecker, proof_of
from tests.api.conftest import REPLY, Served, serving
from tests.api.engine import ScriptedEngine
from tests.api.tokenizers_made_here import byte_level
from tests.support.foreign_router import (
    CHAT,
    CLUSTER_KEY,
    COMPLETION,
    AnswerSoFar,
    ChoiceSoFar,
    continued,
    cut_at,
    post,
    proof_headers,
    read,
)

PATHS = pytest.mark.parametrize("path", [CHAT, COMPLETION], ids=["chat", "completions"])
BODIES: dict[str, dict[str, object]] = {
    CHAT: {"messages": [{"role": "user", "content": "hi"}]},
    COMPLETION: {"prompt": "hi"},
}
FAULT = PdFault(PdCode(502), PdStage.DECODE, "preempted")


@pytest.fixture
def url(engine: ScriptedEngine, text: ModelText, settings: ApiSettings) -> Iterator[str]:
    """It says REPLY a byte at a time, so that characters are cut too."""
    engine.script = lambda _: [*REPLY.encode(), min(text.eos_ids)]
    with serving(engine, text, settings, ProofChecker(key_of_text(CLUSTER_KEY), time.time)) as served:
        yield f"http://127.0.0.1:{served.port}"


def asked(path: str, **fields: object) -> dict[str, object]:
    return BODIES[path] | {"stream": True, "return_token_ids": True, "stream_options": {"include_usage": True}} | fields


def whole(path: str, **fields: object) -> dict[str, object]:
    return BODIES[path] | {"return_token_ids": True} | fields


def together(before: AnswerSoFar, after: AnswerSoFar) -> list[ChoiceSoFar]:
    """What a client has in the end that was sent both."""
    return [
        ChoiceSoFar(a.text + b.text, a.ids + b.ids, b.finish, a.openings + b.openings, a.logprobs + b.logprobs)
        for a, b in zip(before.choices, after.choices, strict=True)
    ]


def so_far(*choices: tuple[list[int], str]) -> AnswerSoFar:
    return AnswerSoFar([ChoiceSoFar(sent, ids) for ids, sent in choices])


def refused(response: httpx.Response, param: str) -> str:
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param), response.text
    return str(error["message"])


# ── the seam ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


@PATHS
@pytest.mark.parametrize("with_sent", [True, False], ids=["characters counted", "ids alone"])
@pytest.mark.parametrize(
    "fields",
    [{}, {"stop": ["好 é!", "end"]}, {"stop": "world, 你好 ê"}, {"max_tokens": 17}, {"logprobs": 1}, {"min_tokens": 40}],
    ids=["plain", "stop string", "almost a stop string", "max_tokens", "logprobs", "min_tokens"],
)
def test_a_stream_cut_after_any_token_goes_on_without_a_seam(
    url: str, path: str, with_sent: bool, fields: dict[str, object]
) -> None:
    if path == CHAT and "logprobs" in fields:
        fields = {"logprobs": True}
    body = asked(path, **fields)
    undisturbed = post(url, path, body)
    (expected,) = (answer := read(undisturbed, 1)).choices
    # Ids alone do not say whether the client of a complete answer has the text that was held back to its end.
    for tokens in range(len(expected.ids) + with_sent):
        before = cut_at(undisturbed, [tokens])
        after = read(post(url, path, continued(body, before, with_sent)), 1)
        assert together(before, after) == [expected], f"cut after {tokens} tokens"
        assert (after.usage, after.done) == (answer.usage, True)
        assert after.choices[0].logprobs == (len(expected.ids) - tokens if "logprobs" in fields else 0)


@PATHS
@pytest.mark.parametrize("fields", [{}, {"stop": ["好 é!"]}, {"max_tokens": 9}, {"n": 2}])
def test_an_answer_that_is_not_streamed_comes_whole(url: str, path: str, fields: dict[str, object]) -> None:
    body, n = whole(path, **fields), 2 if "n" in fields else 1
    answer = read(post(url, path, body), n)
    for tokens in range(len(answer.choices[0].ids) + 1):
        ids = [choice.ids[:tokens] for choice in answer.choices]
        assert read(post(url, path, body | {"generated_token_ids": ids}), n) == answer


def test_an_echoed_prompt_is_sent_once(url: str) -> None:
    body = asked(COMPLETION, echo=True)
    undisturbed = post(url, COMPLETION, body)
    (expected,) = read(undisturbed, 1).choices
    assert expected.text == "hi" + REPLY
    for tokens in (0, 1, 5):
        before = cut_at(undisturbed, [tokens])
        had = before.choices[0].text.removeprefix("hi")
        after = post(url, COMPLETION, continued(body, so_far((before.choices[0].ids, had))))
        assert together(before, read(after, 1)) == [expected]
    plain = whole(COMPLETION, echo=True, generated_token_ids=expected.ids[:3])
    assert read(post(url, COMPLETION, plain), 1).choices[0].text == "hi" + REPLY


def test_text_offsets_of_log_probabilities_go_on(url: str) -> None:
    first = post(url, COMPLETION, whole(COMPLETION, logprobs=0)).json()["choices"][0]
    rest = post(url, COMPLETION, whole(COMPLETION, logprobs=0, generated_token_ids=first["token_ids"][:9])).json()
    assert rest["choices"][0]["logprobs"] == {name: items[9:] for name, items in first["logprobs"].items()}


# ── several choices ──────────────────────────────────────────────────────────────────────────────────────────────────────


def different(text: ModelText) -> Any:
    """Each choice of a prompt says something else."""
    eos = min(text.eos_ids)
    replies = ["short", "a longer 你好 answer"]
    return lambda one: [*one.prompt.tolist(), *replies[one.sampling.choice].encode(), eos]


@PATHS
def test_each_choice_goes_on_where_it_was_cut(url: str, engine: ScriptedEngine, text: ModelText, path: str) -> None:
    engine.script = different(text)
    body = asked(path, n=2)
    undisturbed = post(url, path, body)
    answer = read(undisturbed, 2)
    lengths = [len(choice.ids) for choice in answer.choices]
    for cuts in [(0, 0), (0, 5), (3, 0), (2, 11), (lengths[0], 4), (4, lengths[1]), tuple(lengths)]:
        engine.groups.clear()
        before = cut_at(undisturbed, cuts)
        after = read(post(url, path, continued(body, before)), 2)
        assert together(before, after) == answer.choices, cuts
        assert after.usage == answer.usage
        left = [index for index in (0, 1) if cuts[index] < lengths[index]]
        submitted: list[Submission] = [one for group in engine.groups for one in group]
        assert [(one.sampling.choice, len(one.generated)) for one in submitted] == [(i, cuts[i]) for i in left]
        assert [one.leader for one in submitted] == [None, *([submitted[0].request_id] if len(left) > 1 else [])][
            : len(left)
        ]


def test_prompts_and_choices_are_in_the_order_of_the_answer(url: str, engine: ScriptedEngine, text: ModelText) -> None:
    engine.script = different(text)
    body = whole(COMPLETION, prompt=["ab", "cd"], n=2)
    answer = read(post(url, COMPLETION, body), 4)
    ids = [choice.ids[: 2 * index] for index, choice in enumerate(answer.choices)]
    assert read(post(url, COMPLETION, body | {"generated_token_ids": ids}), 4) == answer
    first, second = engine.groups[-1][1], engine.groups[-1][3]
    assert (first.leader, second.leader) == (engine.groups[-1][0].request_id, engine.groups[-1][2].request_id)


# ── what the client has of it ────────────────────────────────────────────────────────────────────────────────────────────


def test_tokens_whose_text_was_not_sent_are_not_lost(url: str, engine: ScriptedEngine, text: ModelText) -> None:
    """An attempt that ends early has no text with its last tokens; the ids have them."""
    ids = list(REPLY.encode()[:11])
    script, engine.script, engine.fault, engine.burst_tokens = engine.script, lambda _: ids, lambda _: FAULT, 4
    body = asked(CHAT)
    del body["return_token_ids"]
    (cut,) = read(post(url, CHAT, body), 1).choices
    assert (cut.text, cut.finish) == (text.decode(ids[:8]), "pd_reschedule")
    engine.script, engine.fault = script, lambda _: None
    after = post(url, CHAT, continued(body, so_far((ids, cut.text))))
    assert cut.text + read(after, 1).choices[0].text == REPLY


def test_an_attempt_that_continues_may_be_rescheduled_again(url: str, engine: ScriptedEngine, text: ModelText) -> None:
    ids = list(REPLY.encode()[:11])
    engine.script, engine.fault = lambda _: ids, lambda _: FAULT
    body = asked(CHAT, generated_token_ids=ids[:5], sent_characters=3)
    events = [line for line in post(url, CHAT, body).text.split("\n\n") if "pd_reschedule" in line]
    (choice,) = json.loads(events[0].removeprefix("data: "))["choices"]
    assert choice["completion_token_ids"] == ids
    (whole_choice,) = post(url, CHAT, whole(CHAT, generated_token_ids=ids[:5])).json()["choices"]
    assert (whole_choice["completion_token_ids"], whole_choice["message"]["content"]) == (ids, "")


def test_what_another_server_sent_early_is_not_sent_again(url: str) -> None:
    """Held back here, since a stop string may begin with it; another server may have sent it."""
    ids = list(REPLY.encode()[:8])
    body = asked(COMPLETION, stop="world!", generated_token_ids=ids)
    assert read(post(url, COMPLETION, body), 1).choices[0].text == REPLY[6:]
    assert read(post(url, COMPLETION, body | {"sent_characters": 8}), 1).choices[0].text == REPLY[8:]
    assert read(post(url, COMPLETION, body | {"sent_characters": 2}), 1).choices[0].text == REPLY[2:]
    assert "have 8 characters" in refused(post(url, COMPLETION, body | {"sent_characters": 9}), "sent_characters")


DECODER = byte_level()
TEXT = ModelText(DECODER, chat_template=None, eos_ids=[DECODER.token_to_id("<|end|>")])


@settings(deadline=None)
@given(
    st.data(),
    st.text(alphabet="abé你😀 ", max_size=20),
    st.lists(st.text(alphabet="abé你", min_size=1, max_size=3), max_size=2),
)
def test_cut_and_sent_anywhere_the_text_is_the_same(data: st.DataObject, said: str, stops: list[str]) -> None:
    ids = tuple(said.encode()) + tuple(data.draw(st.lists(st.integers(0, 255), max_size=3)))
    min_tokens = data.draw(st.integers(0, 4))

    def reader() -> ChoiceReader:
        scanner = StopScanner(stops) if stops else None
        return ChoiceReader(0, TEXT.detokenizer((), skip_special=True), scanner, frozenset(), min_tokens)

    def rest(of: ChoiceReader, tokens: tuple[int, ...]) -> tuple[str, int, FinishReason | None]:
        text = of.read(TokenBurst(tokens, (), StreamEnd(FinishReason.LENGTH, 0))).text
        return text, of.tokens, of.finish

    undisturbed = reader()
    expected, tokens, finish = rest(undisturbed, ids)
    cut = data.draw(st.integers(0, len(ids)))
    sent = data.draw(st.one_of(st.none(), st.integers(0, len(expected))))
    first, second = reader(), reader()
    had = first.read(TokenBurst(ids[:cut], (), None)).text
    second.continue_after(ids[:cut], sent)
    new = () if second.stopped_by_string else ids[cut:]
    text, now, why = rest(second, new)
    assert (text, now, why) == (expected[len(had) if sent is None else sent :], tokens, finish)


# ── proof ────────────────────────────────────────────────────────────────────────────────────────────────────────────────


@PATHS
def test_without_a_proof_it_is_refused_as_before_and_says_how(url: str, engine: ScriptedEngine, path: str) -> None:
    for field in ("generated_token_ids", "sent_characters"):
        response = httpx.post(url + path, json=BODIES[path] | {field: [1]})
        assert f"internal and cannot be set by a client; a router proves itself with the header {HEADER}" in refused(
            response, field
        )
    assert engine.groups == []


def test_a_server_without_a_cluster_key_takes_no_proof(served: Served, engine: ScriptedEngine) -> None:
    raw = json.dumps(BODIES[CHAT] | {"generated_token_ids": [1]}).encode()
    reply = served.call("POST", CHAT, raw=raw, headers=proof_headers(CHAT, raw))
    assert (reply.status, reply.error["param"]) == (400, "generated_token_ids")
    assert engine.groups == []


def test_a_proof_that_does_not_hold_is_refused_whatever_the_body(url: str, engine: ScriptedEngine) -> None:
    raw = json.dumps(BODIES[CHAT] | {"generated_token_ids": [104]}).encode()
    key, now = key_of_text(CLUSTER_KEY), time.time()
    wrong = {
        "not made with this cluster's key": proof_headers(CHAT, raw, "the key of another cluster")[HEADER],
        "for POST /v1/chat/completions": proof_headers(COMPLETION, raw)[HEADER],
        "the body is not the one": proof_headers(CHAT, raw + b" ")[HEADER],
        "s off this machine's clock": proof_of(key, "POST", CHAT, raw, now - 40, b"0" * 16),
        "TIME NONCE DIGEST MAC": CLUSTER_KEY,
    }
    for reason, header in wrong.items():
        response = httpx.post(url + CHAT, content=raw, headers={HEADER: header, "Content-Type": "application/json"})
        assert reason in refused(response, HEADER)
        assert response.json()["error"]["code"] == "bad_cluster_proof"
        assert CLUSTER_KEY not in response.text
    assert engine.groups == []


def test_a_recorded_request_is_refused_when_it_is_sent_again(url: str, engine: ScriptedEngine) -> None:
    raw = json.dumps(BODIES[CHAT] | {"generated_token_ids": [104]}).encode()
    headers = proof_headers(CHAT, raw)
    assert httpx.post(url + CHAT, content=raw, headers=headers).status_code == 200
    assert "it was used before" in refused(httpx.post(url + CHAT, content=raw, headers=headers), HEADER)
    assert len(engine.groups) == 1


def test_a_proof_opens_no_other_internal_field(url: str) -> None:
    for name in ("kv_transfer_params", "prefill_at", "epoch"):
        assert "internal" in refused(post(url, CHAT, BODIES[CHAT] | {name: 1}), name)


# ── bad continuations ────────────────────────────────────────────────────────────────────────────────────────────────────


@PATHS
@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"generated_token_ids": [320]}, "generated_token_ids", "the vocabulary has 320 ids"),
        ({"generated_token_ids": [-1]}, "generated_token_ids", "list of token ids"),
        ({"generated_token_ids": ["a"]}, "generated_token_ids", "list of token ids"),
        ({"generated_token_ids": [True]}, "generated_token_ids", "list of token ids"),
        ({"generated_token_ids": 5}, "generated_token_ids", "list of token ids"),
        ({"generated_token_ids": [[1], 2]}, "generated_token_ids", "list of token ids"),
        ({"generated_token_ids": [[1], [2]]}, "generated_token_ids", "for 2 choices; this body has 1"),
        ({"generated_token_ids": [1], "n": 2}, "generated_token_ids", "for 1 choices; this body has 2"),
        ({"generated_token_ids": [1] * 6, "max_tokens": 5}, "generated_token_ids", "more than the 5 that max_tokens"),
        ({"generated_token_ids": [1] * 512}, "generated_token_ids", "that the context allows"),
        ({"generated_token_ids": [1, 7, 1], "stop_token_ids": [7]}, "generated_token_ids", "after the stop token 7"),
        ({"sent_characters": 3}, "sent_characters", "needs 'generated_token_ids'"),
        ({"generated_token_ids": [104], "sent_characters": -1}, "sent_characters", "number of characters"),
        ({"generated_token_ids": [104], "sent_characters": "1"}, "sent_characters", "number of characters"),
        ({"generated_token_ids": [104], "sent_characters": []}, "sent_characters", "number of characters"),
        ({"generated_token_ids": [104], "sent_characters": [1, 1]}, "sent_characters", "for 2 choices"),
        ({"generated_token_ids": [104], "sent_characters": 2}, "sent_characters", "have 1 characters"),
    ],
)  # fmt: skip
def test_what_cannot_be_continued_is_refused_by_its_field(
    url: str, engine: ScriptedEngine, path: str, fields: dict[str, object], param: str, message: str
) -> None:
    assert message in refused(post(url, path, BODIES[path] | fields), param)
    assert engine.groups == []


@PATHS
def test_nothing_generated_and_null_are_a_fresh_request(url: str, path: str) -> None:
    for fields in ({"generated_token_ids": []}, {"generated_token_ids": None}, {"generated_token_ids": [[]]}):
        (choice,) = read(post(url, path, asked(path, **fields)), 1).choices
        assert (choice.text, choice.openings) == (REPLY, 1 if path == CHAT else 0)
