"""Python in the documents does what is said of it."""

from __future__ import annotations

import time

from baton.wire.keyfile import key_of_text
from baton.wire.request_proof import ProofChecker
from tests.docs.pages import blocks


def test_a_proof_made_as_the_page_about_continuing_says_holds() -> None:
    (block,) = [one for one in blocks("python") if one.page == "docs/continuation.md"]
    names: dict[str, object] = {}
    exec(block.text, names)  # noqa: S102
    path, body, key = "/v1/completions", b'{"prompt": "hi", "generated_token_ids": [1]}', "a text of sixteen letters"
    (header, proof), _ = names["proof"](key, path, body).items()
    checker = ProofChecker(key_of_text(key), time.time)
    assert header == checker.header
    assert checker.why_not("POST", path, body, proof) is None
