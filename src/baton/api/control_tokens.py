"""Keeps control tokens out of what clients write: `<|im_start|>` in a message is text, in the chat template a token.

A template mixes its own text with the client's, so which is which is marked in the characters themselves:

    client's strings   <|im_start|>  →  ◊|im_start|>     before rendering: one character gets a twin from a private range
    rendered text      <|im_start|>  →  a mark           only the template wrote it: a twin is part of every other one
    marked text        ◊             →  <                encoded by a tokenizer that knows marks and no control tokens

Twins replace single characters, so templates may trim, measure and cut as they like. Where no string of a client has a part
of a control token there is nothing to hide, and the text is encoded as it always was.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from tokenizers import AddedToken, Tokenizer

from baton.core.errors import BatonError

_TWINS = range(0x100000, 0x10FFFE)
"""Code points of the last private-use plane."""


class ControlTokenInText(BatonError):
    """A client's text that cannot be encoded without a control token."""


@dataclass(frozen=True, slots=True)
class DisguisedChat:
    """A chat in which no string of the client spells a control token."""

    messages: list[dict[str, object]]
    extra: dict[str, object]
    originals: Mapping[int, int]
    """Twin → the character that it stands for, as code points."""


class ControlTokens:
    def __init__(self, tokenizer: Tokenizer) -> None:
        added = tokenizer.get_added_tokens_decoder()
        specials = [token.content for token in added.values() if token.special and token.content]
        lowered = {content.lower() for content in specials}
        self._ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._spelled = _pattern(lowered)
        # A template may write the first or last character itself, as of a tag around a name.
        self._bared = _pattern(part for word in lowered for part in (word[1:], word[:-1], word[1:-1]) if len(part) > 1)
        self._written = _pattern(specials)
        self._prefixes = frozenset(word[:end] for word in lowered for end in range(1, len(word)))
        self._suffixes = frozenset(word[start:] for word in lowered for start in range(1, len(word)))
        self._border = max(map(len, lowered), default=1)
        # Random, so that no client can write a mark.
        secret = secrets.token_hex(16)
        self._marks = {content: f"\U0010fffd{secret}{number}\U0010fffd" for number, content in enumerate(specials)}
        self._plain = _sharing_the_model_of(tokenizer)
        self._plain_ids = _add_tokens(self._plain, added, self._marks)
        self._before, self._after = _frame(tokenizer)

    def disguise(
        self, messages: Sequence[Mapping[str, object]], extra: Mapping[str, object], template: str
    ) -> DisguisedChat | None:
        """None where no string of the client has a control token, or a part of one at its border.

        Two strings that a template puts side by side might spell one together; of message texts the borders are looked at
        too. Roles are a fixed list, from which templates make control tokens.
        """
        spots = [{key: self._spots(text) for key, text in _texts(message)} for message in messages]
        words = [
            *strings_in(extra),
            *(word for message in messages for _, value in _values(message) for word in strings_in(value)),
        ]
        if not any(map(any, (message.values() for message in spots))) and not any(map(self._bare_occurrences, words)):
            return None
        texts = [text for message in messages for _, text in _texts(message)]
        twins = _Twins([*texts, *words, template])

        def hide(word: str) -> str:
            return twins.hide(word, self._bare_occurrences(word))

        hidden = [
            dict(message)
            | {key: twins.hide(text, spots[index][key]) for key, text in _texts(message)}
            | {key: _mapped(value, hide) for key, value in _values(message)}
            for index, message in enumerate(messages)
        ]
        shown = {key: _mapped(value, hide) for key, value in extra.items()}
        return DisguisedChat(hidden, shown, twins.originals)

    def encode_rendered(self, rendered: str, chat: DisguisedChat) -> list[int]:
        marked = rendered if self._written is None else self._written.sub(lambda found: self._marks[found[0]], rendered)
        return self._encoded(marked.translate(chat.originals))

    def encode_as_text(self, text: str, add_special_tokens: bool) -> list[int]:
        """The ids of a text in which no control token is recognised. `add_special_tokens`: with those around every text."""
        ids = self._encoded(text)
        return [*self._before, *ids, *self._after] if add_special_tokens else ids

    def _encoded(self, text: str) -> list[int]:
        (encoded,) = self._plain.encode_batch_fast([text], add_special_tokens=False)
        known = self._plain_ids
        ids = [known.get(token_id, token_id) for token_id in encoded.ids]
        # A vocabulary of whole words may have a control token as a word.
        if any(token_id in self._ids and token_id not in known for token_id in encoded.ids):
            raise ControlTokenInText("the text has a control token that this tokenizer cannot spell in other tokens")
        return ids

    def _occurrences(self, text: str) -> list[int]:
        """Where control tokens begin, in any letter case, since templates may change it. Overlapping ones too."""
        return _starts(self._spelled, text)

    def _bare_occurrences(self, text: str) -> list[int]:
        """The same for control tokens without their first or last character."""
        return _starts(self._bared, text)

    def _spots(self, text: str) -> list[int]:
        """Indexes to hide: the first character of each occurrence, and one in each part of a control token at a border."""
        found = self._occurrences(text)
        for start, end in dict.fromkeys([(0, len(text)), _trimmed(text)]):
            head, tail = (
                _lower(text[start : min(end, start + self._border)]),
                _lower(text[max(start, end - self._border) : end]),
            )
            found += [end - size for size in range(1, len(tail) + 1) if tail[-size:] in self._prefixes]
            found += [start + size - 1 for size in range(1, len(head) + 1) if head[:size] in self._suffixes]
        return found


class _Twins:
    """Gives each character that is hidden a code point that none of the texts has."""

    def __init__(self, texts: Iterable[str]) -> None:
        used = {ord(char) for char in set().union(*texts) if ord(char) in _TWINS}
        self._free = (point for point in _TWINS if point not in used)
        self._by_character: dict[str, str] = {}
        self.originals: dict[int, int] = {}

    def hide(self, text: str, spots: Sequence[int]) -> str:
        if not spots:
            return text
        characters = list(text)
        for spot in spots:
            characters[spot] = self._twin_of(text[spot])
        return "".join(characters)

    def _twin_of(self, character: str) -> str:
        if character not in self._by_character:
            point = next(self._free, None)
            if point is None:
                raise ControlTokenInText("the text has a control token, and every character of a private-use plane")
            self._by_character[character] = chr(point)
            self.originals[point] = ord(character)
        return self._by_character[character]


def _texts(message: Mapping[str, object]) -> list[tuple[str, str]]:
    return [(key, text) for key, text in message.items() if key != "role" and isinstance(text, str)]


def _values(message: Mapping[str, object]) -> list[tuple[str, object]]:
    """Fields that are not texts, such as calls of tools."""
    return [(key, value) for key, value in message.items() if not isinstance(value, str)]


def strings_in(value: object) -> Iterator[str]:
    """All strings in a JSON value, keys of inner objects too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from strings_in(key)
            yield from strings_in(item)
    elif isinstance(value, list):
        for item in value:
            yield from strings_in(item)


def _mapped(value: object, change: Callable[[str], str]) -> object:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_mapped(key, change): _mapped(item, change) for key, item in value.items()}
    return [_mapped(item, change) for item in value] if isinstance(value, list) else value


def _starts(pattern: re.Pattern[str] | None, text: str) -> list[int]:
    if pattern is None:
        return []
    lowered, found = _lower(text), []
    at = pattern.search(lowered)
    while at is not None:
        found.append(at.start())
        at = pattern.search(lowered, at.start() + 1)
    return found


def _lower(text: str) -> str:
    """Lower case, character by character: indexes stay those of the text."""
    lowered = text.lower()
    if len(lowered) == len(text):
        return lowered
    return "".join([low if len(low := char.lower()) == 1 else char for char in text])


def _trimmed(text: str) -> tuple[int, int]:
    """Where the text begins and ends without the white space around it."""
    start = len(text) - len(text.lstrip())
    return start, max(start, len(text.rstrip()))


_Trie = dict[str, "_Trie"]


def _pattern(words: Iterable[str]) -> re.Pattern[str] | None:
    """Matches the longest of the words. A tree, not a list of them: a list is tried word by word at every character."""
    root: _Trie = {}
    for word in words:
        node = root
        for char in word:
            node = node.setdefault(char, {})
        node[""] = {}
    return re.compile(_branches(root)) if root else None


def _branches(node: _Trie) -> str:
    paths = [re.escape(char) + _branches(child) for char, child in node.items() if char]
    if not paths:
        return ""
    inner = paths[0] if len(paths) == 1 and "" not in node else f"(?:{'|'.join(paths)})"
    return inner + "?" if "" in node else inner


def _sharing_the_model_of(tokenizer: Tokenizer) -> Tokenizer:
    """A tokenizer without added tokens. The model is the same object, so a large vocabulary is not held twice."""
    plain = Tokenizer(tokenizer.model)
    if tokenizer.normalizer is not None:
        plain.normalizer = tokenizer.normalizer
    if tokenizer.pre_tokenizer is not None:
        plain.pre_tokenizer = tokenizer.pre_tokenizer
    return plain


def _add_tokens(plain: Tokenizer, added: Mapping[int, AddedToken], marks: Mapping[str, str]) -> dict[int, int]:
    """Add marks in place of control tokens, and other added tokens as they are. Returns plain's id → the tokenizer's id."""
    vocabulary = plain.get_vocab(with_added_tokens=False)
    # Ids of added tokens begin at the number of words; where ids have gaps, words of the model would share them.
    gaps = max(vocabulary.values(), default=-1) + 1 - len(vocabulary)
    filler = secrets.token_hex(16)
    plain.add_tokens([AddedToken(f"\U0010fffd{filler}{number}", normalized=False) for number in range(gaps)])
    ids: dict[int, int] = {}
    for token_id, token in sorted(added.items()):
        content = marks.get(token.content, token.content) if token.special else token.content
        alike = AddedToken(content, lstrip=token.lstrip, rstrip=token.rstrip, normalized=token.normalized)
        plain.add_tokens([alike])
        if (plain_id := plain.token_to_id(content)) is not None:
            ids[plain_id] = token_id
    return ids


def _frame(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """The ids that the tokenizer puts before and after a text."""
    bare = tokenizer.encode("a", add_special_tokens=False).ids
    framed = tokenizer.encode("a", add_special_tokens=True).ids
    for start in range(len(framed) - len(bare) + 1):
        if framed[start : start + len(bare)] == bare:
            return framed[:start], framed[start + len(bare) :]
    return [], []
