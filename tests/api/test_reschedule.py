"""An attempt that ends before its answer does: what the client, or a router in its place, is given to go on from."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import openai
import pytest

from baton.api.engine import StreamEnd
from baton.api.model_text import ModelText
from baton.core.engine.ended import Bill
from baton.core.engine.request import FinishReason, Submission
from baton.core.handover.faults import PdCode, PdFault, PdStage
from tests.api.conftest import REPLY, Served
from tests.api.engine import ScriptedEngine
from tests.support.waiting import wait_until

FAULTS = [
    PdFault(PdCode(500), PdStage.OFFER, "no room for 9 blocks"),
    PdFault(PdCode(501), PdStage.TRANSFER, "the checks of block 3 differ"),
    PdFault(PdCode(502), PdStage.DECODE, "preempted"),
    PdFault(PdCode(408), PdStage.PREFILL, "nothing was heard for 2 s"),
]
FAULT = FAULTS[2]
HI = [{"role": "user", "content": "hi"}]
ENDPOINTS = pytest.mark.parametrize("endpoint", ["chat", "complete"])
SEAMS = pytest.mark.parametrize("alone", [False, True], ids=["with the last tokens", "alone"])


def ask(served: Served, endpoint: str, **fields: object) -> Any:
    return served.chat(**fields) if endpoint == "chat" else served.complete(**fields)


def text_of(choice: dict[str, Any]) -> str:
    """Of a whole choice or of a chunk's, on either endpoint."""
    if "text" in choice:
        return choice["text"]
    return choice.get("message", choice.get("delta", {})).get("content", "")


def pd_error(fault: PdFault, ids: list[int]) -> dict[str, object]:
    return {
        "message": fault.message,
        "code": fault.code,
        "stage": fault.stage,
        "retryable": True,
        "generated_token_ids": ids,
    }


@pytest.fixture
def reschedule(engine: ScriptedEngine) -> Callable[..., list[int]]:
    """Makes every attempt end after these tokens."""

    def set_up(ids: list[int], fault: PdFault = FAULT, alone: bool = False) -> list[int]:
        engine.script, engine.fault, engine.faults_come_alone = lambda _: ids, lambda _: fault, alone
        return ids

    return set_up


Reschedule = Callable[..., list[int]]


# ── whole answers ────────────────────────────────────────────────────────────────────────────────────────────────────────


@ENDPOINTS
@SEAMS
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: str(fault.code))
def test_a_whole_answer_has_no_text_but_every_token_and_the_fault(
    served: Served, text: ModelText, reschedule: Reschedule, endpoint: str, alone: bool, fault: PdFault
) -> None:
    ids = reschedule(text.encode("hello world, 你"), fault, alone)
    reply = ask(served, endpoint)
    answer = reply.json()
    (choice,) = answer["choices"]
    assert reply.status == 200
    assert (choice["finish_reason"], text_of(choice)) == ("pd_reschedule", "")
    assert choice["completion_token_ids"] == ids
    assert choice["error"] == pd_error(fault, ids)
    assert answer["usage"]["completion_tokens"] == len(ids)
    assert answer["usage"]["total_tokens"] == answer["usage"]["prompt_tokens"] + len(ids)


@ENDPOINTS
@pytest.mark.parametrize("stream", [False, True])
def test_an_attempt_that_generated_nothing_says_so(
    served: Served, reschedule: Reschedule, endpoint: str, stream: bool
) -> None:
    reschedule([], FAULTS[0])
    reply = ask(served, endpoint, stream=stream, **({"stream_options": {"include_usage": True}} if stream else {}))
    answer = reply.events()[-2] if stream else reply.json()
    choices = [choice for event in reply.events()[:-2] for choice in event["choices"]] if stream else answer["choices"]
    assert "".join(map(text_of, choices)) == ""
    assert choices[-1]["completion_token_ids"] == []
    assert choices[-1]["error"] == pd_error(FAULTS[0], [])
    assert answer["usage"]["completion_tokens"] == 0


@ENDPOINTS
def test_token_id_0_is_a_token_like_any_other(served: Served, reschedule: Reschedule, endpoint: str) -> None:
    ids = reschedule([0, 0, 0])
    answer = ask(served, endpoint).json()
    assert answer["choices"][0]["completion_token_ids"] == ids
    assert answer["usage"]["completion_tokens"] == 3


def test_an_echo_is_not_shown_either(served: Served, reschedule: Reschedule, text: ModelText) -> None:
    reschedule(text.encode("hello"))
    assert served.complete(echo=True).json()["choices"][0]["text"] == ""
    reschedule([])
    (last,) = served.complete(echo=True, stream=True).events()[0]["choices"]
    assert (last["text"], last["finish_reason"]) == ("", "pd_reschedule")


@ENDPOINTS
def test_log_probabilities_of_what_was_generated_are_kept(
    served: Served, text: ModelText, reschedule: Reschedule, endpoint: str
) -> None:
    """Whoever goes on cannot find them again: to it these tokens are part of the prompt."""
    ids = reschedule(text.encode("hello world"))
    asked = {"logprobs": True} if endpoint == "chat" else {"logprobs": 1}
    whole = ask(served, endpoint, **asked).json()["choices"][0]
    chunks = [event["choices"][0] for event in ask(served, endpoint, stream=True, **asked).events()[:-1]]
    for choices in ([whole], chunks):
        found = [choice["logprobs"] for choice in choices if choice["logprobs"]]
        entries = [entry for one in found for entry in (one["content"] if endpoint == "chat" else one["token_logprobs"])]
        assert len(entries) == len(ids)
    assert (text_of(whole), text_of(chunks[-1])) == ("", "")


# ── streams ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


@ENDPOINTS
@SEAMS
@pytest.mark.parametrize("burst", [1, 2, 100])
def test_a_stream_keeps_what_was_sent_and_ends_with_every_token(
    served: Served, engine: ScriptedEngine, text: ModelText, reschedule: Reschedule, endpoint: str, alone: bool, burst: int
) -> None:
    ids = reschedule(text.encode("hello world, and"), alone=alone)
    engine.burst_tokens = burst
    *chunks, usage, done = ask(served, endpoint, stream=True, stream_options={"include_usage": True}).events()
    choices = [chunk["choices"][0] for chunk in chunks]
    sent = ids if alone else ids[: (len(ids) - 1) // burst * burst]
    assert "".join(map(text_of, choices)) == text.decode(sent)
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["pd_reschedule"]
    last = choices[-1]
    assert (last.get("delta"), last.get("text")) == (({}, None) if endpoint == "chat" else (None, ""))
    assert last["completion_token_ids"] == ids
    assert last["error"] == pd_error(FAULT, ids)
    assert all("error" not in choice and "completion_token_ids" not in choice for choice in choices[:-1])
    assert usage["usage"]["completion_tokens"] == len(ids)
    assert done == "[DONE]"


@ENDPOINTS
@SEAMS
def test_half_a_character_at_the_seam_is_not_shown(
    served: Served, text: ModelText, reschedule: Reschedule, endpoint: str, alone: bool
) -> None:
    ids = reschedule([*text.encode("hello"), *"你".encode()[:2]], alone=alone)
    choices = [event["choices"][0] for event in ask(served, endpoint, stream=True).events()[:-1]]
    assert "".join(map(text_of, choices)) == "hello"
    assert choices[-1]["completion_token_ids"] == ids


@ENDPOINTS
@SEAMS
def test_the_beginning_of_a_stop_string_at_the_seam_is_not_shown(
    served: Served, text: ModelText, reschedule: Reschedule, endpoint: str, alone: bool
) -> None:
    ids = reschedule([*text.encode("hello"), *b"STO"], alone=alone)
    choices = [event["choices"][0] for event in ask(served, endpoint, stream=True, stop="STOP").events()[:-1]]
    assert "".join(map(text_of, choices)) == "hello"
    assert choices[-1]["completion_token_ids"] == ids


@ENDPOINTS
@SEAMS
@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_its_last_tokens_complete_is_a_whole_one(
    served: Served, text: ModelText, reschedule: Reschedule, endpoint: str, alone: bool, stream: bool
) -> None:
    """The stop string is there: nothing is left to go on with, whatever became of the attempt."""
    ids = reschedule([*text.encode("hello"), *b"STOP"], alone=alone)
    options = {"stream_options": {"include_usage": True}} if stream else {}
    reply = ask(served, endpoint, stream=stream, stop="STOP", **options)
    answer = reply.events()[-2] if stream else reply.json()
    choices = [choice for event in reply.events()[:-2] for choice in event["choices"]] if stream else answer["choices"]
    assert "".join(map(text_of, choices)) == "hello"
    assert choices[-1]["finish_reason"] == "stop"
    assert "error" not in choices[-1]
    assert answer["usage"]["completion_tokens"] == len(ids)


def test_a_stop_string_does_not_count_before_min_tokens(served: Served, text: ModelText, reschedule: Reschedule) -> None:
    reschedule(text.encode("hello"))
    (choice,) = served.complete(stop="hello", min_tokens=5).json()["choices"]
    assert choice["finish_reason"] == "pd_reschedule"


@pytest.mark.parametrize("stream", [False, True])
def test_token_ids_asked_for_come_as_always(served: Served, text: ModelText, reschedule: Reschedule, stream: bool) -> None:
    ids = reschedule(text.encode("hello world, and"))
    reply = served.complete(stream=stream, return_token_ids=True)
    choices = [event["choices"][0] for event in reply.events()[:-1]] if stream else reply.json()["choices"]
    assert [i for choice in choices for i in choice["token_ids"]] == ids
    assert choices[0]["prompt_token_ids"] == [104, 105]
    assert choices[-1]["completion_token_ids"] == ids


# ── one body, several choices ────────────────────────────────────────────────────────────────────────────────────────────


def only(*requests: tuple[str, int]) -> Callable[[Submission], PdFault | None]:
    """A fault for these (prompt, choice) alone."""

    def fault(submission: Submission) -> PdFault | None:
        prompt = bytes(submission.prompt.tolist()).decode()
        return FAULT if (prompt, submission.sampling.choice) in requests else None

    return fault


@pytest.mark.parametrize("stream", [False, True])
def test_the_other_choices_of_the_body_finish_as_usual(
    served: Served, engine: ScriptedEngine, text: ModelText, stream: bool
) -> None:
    engine.fault = only(("a", 1), ("b", 0))
    whole, cut = [*text.encode(REPLY), min(text.eos_ids)], text.encode("hello world")
    engine.script = lambda submission: whole if engine.fault(submission) is None else cut
    options = {"stream_options": {"include_usage": True}} if stream else {}
    reply = served.complete(prompt=["a", "b"], n=2, stream=stream, **options)
    events = reply.events()[:-1] if stream else [reply.json()]
    texts, finishes, ids = dict.fromkeys(range(4), ""), {}, {}
    for choice in (choice for event in events for choice in event["choices"]):
        texts[choice["index"]] += choice["text"]
        if choice["finish_reason"]:
            finishes[choice["index"]] = choice["finish_reason"]
            ids[choice["index"]] = choice.get("completion_token_ids")
    sent = "hello" if stream else ""
    assert texts == {0: REPLY, 1: sent, 2: sent, 3: REPLY}
    assert finishes == {0: "stop", 1: "pd_reschedule", 2: "pd_reschedule", 3: "stop"}
    assert ids == {0: None, 1: cut, 2: cut, 3: None}
    assert events[-1]["usage"]["completion_tokens"] == 2 * (len(whole) + len(cut))
    assert not any(one.aborted for one in engine.streams)


# ── the official client ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_official_client_reads_it_whole_and_streamed(served: Served, text: ModelText, reschedule: Reschedule) -> None:
    ids = reschedule(text.encode("hello world"))
    with openai.OpenAI(base_url=served.base_url, api_key="unused", max_retries=0) as client:
        chat = client.chat.completions.create(model="tiny", messages=HI).choices[0]
        completion = client.completions.create(model="tiny", prompt="hi").choices[0]
        chunk = list(client.chat.completions.create(model="tiny", messages=HI, stream=True))[-1].choices[0]
        piece = list(client.completions.create(model="tiny", prompt="hi", stream=True))[-1].choices[0]
    assert (chat.message.content, completion.text, chunk.delta.content, piece.text) == ("", "", None, "")
    for choice in (chat, completion, chunk, piece):
        assert choice.finish_reason == "pd_reschedule"
        assert choice.model_extra["completion_token_ids"] == ids
        assert choice.model_extra["error"] == pd_error(FAULT, ids)


def test_the_official_client_s_streaming_helper_reads_it(served: Served, text: ModelText, reschedule: Reschedule) -> None:
    """It keeps no extra fields of chunks it has put together, but it does not stumble over them."""
    reschedule(text.encode("hello world"), alone=True)
    with (
        openai.OpenAI(base_url=served.base_url, api_key="unused", max_retries=0) as client,
        client.chat.completions.stream(model="tiny", messages=HI) as stream,
    ):
        choice = stream.get_final_completion().choices[0]
    assert (choice.message.content, choice.finish_reason) == ("hello world", "pd_reschedule")


# ── around it ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_reason_that_does_not_end_is_cut(served: Served, reschedule: Reschedule) -> None:
    reschedule([104], PdFault(PdCode(501), PdStage.TRANSFER, "" + 'ü"\n' * 10_000))
    (choice,) = served.chat().json()["choices"]
    assert choice["error"]["message"].startswith("PD Error 501 (transfer): ")
    assert len(choice["error"]["message"]) < 1100
    assert served.chat(stream=True).events()[-2]["choices"][0]["error"] == choice["error"]


def test_an_end_that_does_not_say_why_is_a_bug_of_ours_and_costs_only_that_request(
    served: Served, engine: ScriptedEngine, reschedule: Reschedule, monkeypatch: pytest.MonkeyPatch
) -> None:
    reschedule([104])
    with monkeypatch.context() as patched:
        patched.setattr("tests.api.engine.StreamEnd", lambda reason, cached, bill, _: StreamEnd(reason, cached, bill, None))
        assert served.chat().error["code"] == "internal_error"
    assert served.chat().json()["choices"][0]["finish_reason"] == "pd_reschedule"


@pytest.mark.parametrize("stream", [False, True])
def test_it_is_counted_logged_and_billed(
    served: Served, engine: ScriptedEngine, reschedule: Reschedule, caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    caplog.set_level(logging.INFO, "baton.access")
    engine.bill = lambda _: Bill(attempts=2, transfer_us=4500)
    reschedule([104, 105, 106])
    reply = served.chat(stream=stream, baton_usage=True)
    usage = (reply.events()[-2] if stream else reply.json())["usage"]
    assert (usage["baton"]["attempts"], usage["baton"]["transfer_ms"]) == (2, 4.5)
    page = served.call("GET", "/metrics").body.decode()
    assert 'baton_request_success_total{finished_reason="pd_reschedule",model_name="tiny"} 1.0' in page
    assert 'baton_generation_tokens_total{model_name="tiny"} 3.0' in page
    (line,) = [record.getMessage() for record in caplog.records if record.name == "baton.access"]
    assert " status=200 tenant=- client=127.0.0.1 finish=pd_reschedule " in line
    assert " completion=3 " in line


def test_a_client_that_cancelled_hears_of_the_cancel_only(
    served: Served, engine: ScriptedEngine, reschedule: Reschedule
) -> None:
    reschedule([104, 105], alone=True)
    engine.hangs_after = 2
    replies = []
    headers = {"X-Request-Id": "long"}
    thread = threading.Thread(target=lambda: replies.append(served.chat(headers=headers)))
    thread.start()
    wait_until(lambda: len(engine.streams) == 1)
    assert served.call("DELETE", "/v1/requests/long").status == 200
    thread.join(10)
    (choice,) = replies[0].json()["choices"]
    assert choice["finish_reason"] == FinishReason.ABORT
    assert "error" not in choice
