"""The text of the scripted executor, loaded without `transformers`, whose import takes as long as all else at a start."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from baton.api.model_text import ModelText
from baton.node.scripted_text import BYTE_VOCABULARY, CHAT_TEMPLATE, END_OF_TEXT


def load_byte_text(folder: Path) -> ModelText:
    """What `load_text` makes of the files of `write_byte_tokenizer`. The first chat imports `transformers`."""
    return ModelText(
        Tokenizer.from_file(str(folder / "tokenizer.json")),
        chat_template=CHAT_TEMPLATE,
        special_tokens={"eos_token": END_OF_TEXT},
        eos_ids=[BYTE_VOCABULARY - 1],
    )
