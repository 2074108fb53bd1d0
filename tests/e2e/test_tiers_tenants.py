"""Who shares KV with whom, in the cache and in the store: by API keys, their groups, and the salts of clients."""

from __future__ import annotations

from pathlib import Path

from tests.support.fleet import baton_up
from tests.support.storing import TIGHT, Body, post, question, right


def test_tenants_share_no_kv_and_groups_do(tmp_path: Path) -> None:
    keys = (word for key in ("one", "two", "team:three", "team:four") for word in ("--api-key", key))
    with baton_up(*TIGHT, "--mixed", "1", "--kv-store", f"file:{tmp_path}/kv", *keys) as fleet:

        def found(key: str, **fields: object) -> int:
            """Tokens of the prompt that need not be computed."""
            body: Body = question(0, max_tokens=2, **fields)
            answer = post(fleet.url, body, key)
            assert answer["choices"][0]["token_ids"] == right(body)[0]
            cached: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            return cached

        assert [found(key) for key in ("one", "two", "three")] == [0, 0, 0]
        assert [found(key) for key in ("one", "two", "three", "four")] == [96] * 4
        assert [found(key, cache_salt="x") for key in ("one", "three")] == [0, 0]
        assert [found(key, cache_salt="x") for key in ("one", "two", "four")] == [96, 0, 96]
