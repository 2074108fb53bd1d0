"""Incremental detokenisation.

Promises that the deltas, put together, are the same text however the ids were cut into bursts, and that no character
is shown before all of its bytes are there. Two ways, chosen by what the tokenizer's decoder is made of:

* byte-level BPE and SentencePiece with byte fallback: every id is a fixed run of bytes, so an incremental UTF-8 decoder
  is exact for any ids, at a constant cost a token;
* anything else: the ids since the last settled character are decoded behind a few ids of context, and what the context
  alone does not account for is new. The window is bounded, so a token costs the same at any length.

Text that will never become valid UTF-8 is shown as U+FFFD. In runs of byte-fallback tokens the whole-sequence decode of
`tokenizers` replaces the valid characters of such a run too; here they survive.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from tokenizers import Tokenizer

_BAD = "�"
_WINDOW_TOKENS = 16
"""A character has at most four bytes; a tail that is still unreadable after this many tokens will stay so."""
_CONTEXT_TOKENS = 6


class Detokenizer(Protocol):
    def push(self, ids: Sequence[int]) -> str:
        """The text that is final after these ids."""

    def flush(self) -> str:
        """The remaining text at the end; invalid bytes become U+FFFD."""


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in for each byte: itself where printable, else the next free code point from 256 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    return alphabet | {chr(256 + i): byte for i, byte in enumerate(others)}


_ALPHABET = _byte_level_alphabet()


def _byte_level_piece(token: str) -> bytes:
    try:
        return bytes([_ALPHABET[char] for char in token])
    except KeyError:
        return token.encode()  # an added token with a character outside the alphabet is its own text


def _fallback_piece(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:
            pass
    return token.replace("▁", " ").encode()


@dataclass(slots=True)
class TokenBytes:
    """The bytes of each token id, computed on first use."""

    tokenizer: Tokenizer
    spell: Callable[[str], bytes]
    strips_first_space: bool
    _known: dict[int, bytes] = field(default_factory=dict)

    def __call__(self, token_id: int) -> bytes:
        piece = self._known.get(token_id)
        if piece is None:
            token = self.tokenizer.id_to_token(token_id)
            # A model's vocabulary is often padded beyond its tokenizer's: such an id has no text.
            piece = self._known[token_id] = b"" if token is None else self.spell(token)
        return piece


_REPLACE_METASPACE = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
_STRIP_FIRST = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
_FALLBACK = [_REPLACE_METASPACE, {"type": "ByteFallback"}, {"type": "Fuse"}]


def pieces_of(tokenizer: Tokenizer) -> TokenBytes | None:
    """The bytes of each token, or None when the tokenizer's decoder does not work token by token."""
    if tokenizer.decoder is None:
        return None
    decoder = json.loads(tokenizer.decoder.__getstate__())
    chain = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    if [step["type"] for step in chain] == ["ByteLevel"]:
        return TokenBytes(tokenizer, _byte_level_piece, strips_first_space=False)
    if chain in (_FALLBACK, [*_FALLBACK, _STRIP_FIRST]):
        return TokenBytes(tokenizer, _fallback_piece, strips_first_space=len(chain) > len(_FALLBACK))
    return None


class ByteDetokenizer:
    def __init__(self, pieces: Callable[[int], bytes], hidden: Container[int], strip_first_space: bool) -> None:
        self._pieces = pieces
        self._hidden = hidden
        self._strip_first_space = strip_first_space
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Sequence[int]) -> str:
        data = b"".join([self._pieces(i) for i in ids if i not in self._hidden])
        if self._strip_first_space and data:
            self._strip_first_space = False
            data = data.removeprefix(b" ")
        return self._utf8.decode(data)

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class WindowDetokenizer:
    """
    context | pending          text(context + pending) − text(context) is the delta;
            ^ settled so far   once it ends in a whole character, pending becomes the next context
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], hidden: Container[int], context: Sequence[int]) -> None:
        self._decode = decode
        self._hidden = hidden
        self._context = [i for i in context[-_CONTEXT_TOKENS:] if i not in hidden]
        self._context_text = decode(self._context)
        self._pending: list[int] = []

    def push(self, ids: Sequence[int]) -> str:
        out = ""
        for token_id in ids:
            if token_id not in self._hidden:
                out += self._push_one(token_id)
        return out

    def _push_one(self, token_id: int) -> str:
        self._pending.append(token_id)
        delta = self._unsettled()
        # An empty delta is kept pending too: a context without text cannot tell a leading space from an inner one.
        if (not delta or delta.endswith(_BAD)) and len(self._pending) < _WINDOW_TOKENS:
            return ""
        return self._settle(delta)

    def _unsettled(self) -> str:
        text = self._decode(self._context + self._pending)
        if text.startswith(self._context_text):
            return text[len(self._context_text) :]
        return self._decode(self._pending)  # the new ids changed how the old ones read: what was shown stays shown

    def _settle(self, delta: str) -> str:
        self._context = self._pending
        self._context_text = self._decode(self._context)
        self._pending = []
        return delta

    def flush(self) -> str:
        return self._settle(self._unsettled()) if self._pending else ""
