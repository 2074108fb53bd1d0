"""The scripted executor's text is loaded without `transformers`, and is what `transformers` would have loaded."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from baton.api.model_text import load_text
from baton.node.byte_text import load_byte_text
from baton.node.scripted_text import write_byte_tokenizer

WITHOUT = """
import sys
from pathlib import Path
import baton.node.service, baton.router.service
from baton.node.byte_text import load_byte_text
text = load_byte_text(Path(sys.argv[1]))
assert text.decode(text.encode("hello")) == "hello"
print(sorted({"torch", "transformers"} & set(sys.modules)))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("bytes")
    write_byte_tokenizer(made)
    return made


def test_it_is_the_text_that_transformers_would_load(folder: Path) -> None:
    ours, theirs = load_byte_text(folder), load_text(folder)
    facts = [(one.vocabulary, one.eos_ids, one.defaults, one.chat_template) for one in (ours, theirs)]
    assert facts[0] == facts[1]
    for text in ("hello", "é 你好\n", "a<|end|>b", ""):
        for parse_special in (True, False):
            ids = ours.encode(text, parse_special=parse_special)
            assert ids == theirs.encode(text, parse_special=parse_special)
            for skip_special in (True, False):
                assert ours.decode(ids, skip_special) == theirs.decode(ids, skip_special)
    chat = [{"role": "user", "content": "hi"}]
    assert ours.render_chat(chat, True, {}) == theirs.render_chat(chat, True, {}) == "user: hi\nassistant: "
    assert [ours.token(i) for i in range(257)] == [theirs.token(i) for i in range(257)]


def test_it_imports_neither_transformers_nor_torch(folder: Path) -> None:
    ran = subprocess.run([sys.executable, "-c", WITHOUT, str(folder)], capture_output=True, text=True, check=True)
    assert ran.stdout == "[]\n"
