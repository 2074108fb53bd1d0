"""Tokenizers made on the spot, nothing fetched: one for each way that decoders work."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from baton.api.detokenise import _ALPHABET

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' and m.content == '' %}{{ raise_exception('empty answer') }}"
    "{% endif %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    "{{ mood or '' }}"
)
SPECIALS = ["<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]


def byte_level(merged: tuple[str, ...] = ("hello", " world", "é", "你好")) -> Tokenizer:
    """256 bytes and a few longer tokens, some of which begin or end within a character."""
    of_byte = {byte: char for char, byte in _ALPHABET.items()}
    vocabulary = {of_byte[byte]: byte for byte in range(256)}
    merges: list[tuple[str, str]] = []
    for word in merged:
        chars = [of_byte[byte] for byte in word.encode()]
        for end in range(2, len(chars) + 1):
            pair = ("".join(chars[: end - 1]), chars[end - 1])
            if "".join(pair) not in vocabulary:
                vocabulary["".join(pair)] = len(vocabulary)
                merges.append(pair)
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIALS)
    tokenizer.add_tokens([AddedToken("<a b>", special=False)])
    return tokenizer


def byte_fallback(strips: bool = True) -> Tokenizer:
    """As SentencePiece models come: words with ▁, bytes as <0xHH>."""
    vocabulary = {"<unk>": 0} | {f"<0x{byte:02X}>": 1 + byte for byte in range(256)}
    for word in ("▁", "▁hello", "▁world", "hello", "a", "b", "é", "▁▁", "\n"):
        vocabulary[word] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    chain = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*chain, decoders.Strip(" ", 1, 0)] if strips else chain)
    tokenizer.add_special_tokens(["</s>"])
    return tokenizer


def metaspace() -> Tokenizer:
    """A decoder that does not work token by token: the first word loses its space."""
    vocabulary = {word: i for i, word in enumerate(["<unk>", "▁hello", "▁world", "lo", "s", "é", "▁", ".", "你"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer
