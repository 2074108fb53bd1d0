"""The least number of tokens that a text can have, known from its bytes: what cannot fit is refused before it is encoded.

Known for BPE over bytes with normalisers and splitters that drop nothing, as today's decoder models have them. Bytes that
may vanish are not counted: those that the vocabulary lacks, and white space where an added token strips it. For other
tokenizers (unknown words become one token) the length of a text says nothing about its tokens.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tokenizers import Tokenizer, models
from tokenizers.normalizers import Normalizer
from tokenizers.pre_tokenizers import PreTokenizer

from baton.api.detokenise import pieces_of

_UNICODE_SHRINKS = 4
"""Most bytes that Unicode normalisation or lower case makes one byte of: mathematical letters have four, plain ones one."""
_KEEPS_ALL = {"ByteLevel": 1, "Prepend": 1, "NFC": _UNICODE_SHRINKS, "NFD": _UNICODE_SHRINKS, "NFKC": _UNICODE_SHRINKS,
              "NFKD": _UNICODE_SHRINKS, "Lowercase": _UNICODE_SHRINKS}  # fmt: skip
_SPLITS = frozenset(["ByteLevel", "Digits", "Metaspace"])
_MAY_REMOVE = frozenset(["Punctuation", "Split"])


_WHITE_SPACE = bytes(sorted(set("".join(filter(str.isspace, map(chr, range(0x3001)))).encode())))
"""Every byte of a white-space character. Other characters have some of them too: they count less, which is safe."""


@dataclass(frozen=True, slots=True)
class TokenLengths:
    bytes_max: int
    """Most bytes of text that become one token."""
    vanishing: bytes
    """Bytes that may become none."""

    def least_tokens(self, texts: Iterable[str]) -> int:
        """A lower bound of the tokens of all texts together."""
        counted = sum(len(text.encode(errors="replace").translate(None, self.vanishing)) for text in texts)
        return -(-counted // self.bytes_max)


def token_lengths(tokenizer: Tokenizer) -> TokenLengths | None:
    """None where a long text may have any number of tokens."""
    shrinks, missing, pieces = _normaliser_shrinks(tokenizer), _missing_bytes(tokenizer), pieces_of(tokenizer)
    if shrinks is None or missing is None or pieces is None or not _splits_keep_all(tokenizer):
        return None
    if missing and shrinks > 1:
        return None  # which characters become missing ones is not known
    added = tokenizer.get_added_tokens_decoder().values()
    strips = any(token.lstrip or token.rstrip for token in added)
    longest = max((len(pieces.spell(token)) for token in tokenizer.get_vocab(with_added_tokens=False)), default=1)
    longest = max([longest, *(len(token.content.encode()) for token in added)])
    return TokenLengths(shrinks * longest, missing + _WHITE_SPACE if strips else missing)


def _normaliser_shrinks(tokenizer: Tokenizer) -> int | None:
    """By how much normalising may shorten a text; None: by any amount."""
    shrinks = 1
    for step in _chain(tokenizer.normalizer, "normalizers"):
        factor = _replacement_shrinks(step) if step["type"] == "Replace" else _KEEPS_ALL.get(str(step["type"]))
        if factor is None:
            return None
        shrinks *= factor
    return shrinks


def _replacement_shrinks(step: Mapping[str, object]) -> int | None:
    pattern, content = step.get("pattern"), step.get("content")
    if not isinstance(pattern, dict) or not isinstance(content, str) or not content or "String" not in pattern:
        return None
    return max(1, -(-len(str(pattern["String"]).encode()) // len(content.encode())))


def _splits_keep_all(tokenizer: Tokenizer) -> bool:
    return all(
        step["type"] in _SPLITS or (step["type"] in _MAY_REMOVE and step.get("behavior") != "Removed")
        for step in _chain(tokenizer.pre_tokenizer, "pretokenizers")
    )


def _missing_bytes(tokenizer: Tokenizer) -> bytes | None:
    """Bytes of UTF-8 that the model has no token for, and drops; None where it makes one token of a run of unknown text."""
    model, pieces = tokenizer.model, pieces_of(tokenizer)
    if not isinstance(model, models.BPE) or pieces is None:
        return None
    if model.byte_fallback:
        has_all = all(tokenizer.token_to_id(f"<0x{byte:02X}>") is not None for byte in range(256))
        return b"" if has_all else None
    steps = [*_chain(tokenizer.normalizer, "normalizers"), *_chain(tokenizer.pre_tokenizer, "pretokenizers")]
    is_fused = model.unk_token is not None and model.fuse_unk
    if is_fused or not any(step["type"] == "ByteLevel" for step in steps):
        return None
    spelled = {pieces.spell(token) for token in tokenizer.get_vocab(with_added_tokens=False) if len(token) == 1}
    return bytes(byte for byte in range(256) if bytes([byte]) not in spelled)


def _chain(part: Normalizer | PreTokenizer | None, inner: str) -> list[Mapping[str, object]]:
    """The steps of a normaliser or a splitter, in order."""
    return [] if part is None else _flat(json.loads(part.__getstate__()), inner)


def _flat(step: Mapping[str, object], inner: str) -> list[Mapping[str, object]]:
    steps = step.get(inner)
    if step["type"] != "Sequence" or not isinstance(steps, list):
        return [step]
    return [one for item in steps for one in _flat(item, inner)]
