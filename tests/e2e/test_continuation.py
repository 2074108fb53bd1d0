"""`baton serve` behind a router that is not ours: an answer begun by one process is continued by another over HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import httpx2 as httpx
import pytest

from tests.support.foreign_router import CHAT, CLUSTER_KEY, COMPLETION, continued, cut_at, post, read
from tests.support.server import ServerProcess, baton_serve

PROMPT = list(range(40, 90))
TOKENS = 24


@pytest.fixture(scope="module")
def key(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    file = tmp_path_factory.mktemp("key") / "cluster.key"
    file.write_text(f"{CLUSTER_KEY}\n")
    file.chmod(0o600)
    return ("--cluster-key-file", str(file))


@pytest.fixture(scope="module", params=["scripted", pytest.param("tiny", marks=pytest.mark.slow)])
def servers(
    request: pytest.FixtureRequest, tiny_options: tuple[str, ...], key: tuple[str, ...]
) -> Iterator[tuple[ServerProcess, ServerProcess]]:
    """Two that know nothing of each other."""
    tiny = (*tiny_options, "--kv-memory", "64M", "--max-num-batched-tokens", "64", "--max-num-seqs", "16")
    options = tiny if request.param == "tiny" else ("--executor", "scripted", "--served-model-name", "m")
    with ExitStack() as stack:
        first, second = (stack.enter_context(baton_serve(*options, *key)) for _ in range(2))
        yield first, second


def body(path: str, **fields: object) -> dict[str, object]:
    asked = {"prompt": PROMPT} if path == COMPLETION else {"messages": [{"role": "user", "content": "Hello, who are you?"}]}
    usual = {"model": "m", "seed": 7, "temperature": 0.8, "ignore_eos": True, "max_tokens": TOKENS, "n": 2}
    streamed = {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}
    return {**asked, **usual, **streamed, **fields}


@pytest.mark.parametrize("path", [CHAT, COMPLETION], ids=["chat", "completions"])
def test_an_answer_cut_after_any_token_is_the_undisturbed_one(
    servers: tuple[ServerProcess, ServerProcess], path: str
) -> None:
    first, second = servers
    penalties = {"frequency_penalty": 0.5, "repetition_penalty": 1.1}
    undisturbed = post(first.url, path, body(path, **penalties))
    answer = read(undisturbed, 2)
    for cut in range(TOKENS + 1):
        before = cut_at(undisturbed, (cut, max(0, cut - 3)))
        after = read(post(second.url, path, continued(body(path, **penalties), before)), 2)
        for had, new, expected in zip(before.choices, after.choices, answer.choices, strict=True):
            assert (had.ids + new.ids, had.text + new.text, new.finish) == (expected.ids, expected.text, expected.finish)
        assert after.usage is not None
        assert answer.usage is not None
        counts = ("prompt_tokens", "completion_tokens", "total_tokens")
        assert [after.usage[name] for name in counts] == [answer.usage[name] for name in counts]


def test_an_answer_that_is_not_streamed_is_continued_from_several_instances(
    servers: tuple[ServerProcess, ServerProcess],
) -> None:
    whole = body(COMPLETION, stream=False, n=1)
    del whole["stream_options"]
    (expected,) = read(post(servers[0].url, COMPLETION, whole), 1).choices
    ids: list[int] = []
    for number, reached in enumerate((5, 9, TOKENS)):
        at = servers[number % 2].url
        ids = read(post(at, COMPLETION, whole | {"generated_token_ids": ids}), 1).choices[0].ids[:reached]
    assert ids == expected.ids
    last = read(post(servers[1].url, COMPLETION, whole | {"generated_token_ids": ids[:9]}), 1).choices[0]
    assert (last.ids, last.text, last.finish) == (expected.ids, expected.text, "length")


def test_without_the_key_nothing_is_continued(servers: tuple[ServerProcess, ServerProcess]) -> None:
    asked = body(COMPLETION, generated_token_ids=[[1], [2]])
    assert httpx.post(servers[0].url + COMPLETION, json=asked).status_code == 400
    wrong = post(servers[0].url, COMPLETION, asked, key="the key of another cluster")
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (400, "bad_cluster_proof")
