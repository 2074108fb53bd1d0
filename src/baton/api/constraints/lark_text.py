"""Writes llguidance grammars in its Lark form: rules, literals, tokens by number, free text up to a marker."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

WHITESPACE_MAX = 2
"""White space between two JSON tokens. A model that may write more without end sometimes does."""
JSON_OPTIONS = {
    "whitespace_pattern": rf"[ \n\r\t]{{1,{WHITESPACE_MAX}}}",
    # Without \u: a key that spells a declared name in escapes would pass for an additional one.
    "json_allowed_escapes": 'nrbtf\\"',
}
ANY_TEXT = "/(?s:.*)/"
LINE = r"LINE: /\n?/"
"""An end of line that may be left out, for all rules."""


class LarkText:
    """Rules of one grammar. `special_tokens`: the added tokens of the tokenizer, text → id."""

    def __init__(self, special_tokens: Mapping[str, int]) -> None:
        self._special_tokens = special_tokens
        self._rules: dict[str, str] = {}
        self._names: dict[str, str] = {}
        """Body and attributes → name, so that equal rules are written once."""

    def is_token(self, text: str) -> bool:
        return text in self._special_tokens

    def literal(self, text: str) -> str:
        """Text that is written out; an added token inside it stands as that token."""
        found = sorted(token for token in self._special_tokens if token in text)
        if not found:
            return quoted(text)
        pattern = "|".join(re.escape(token) for token in sorted(found, key=len, reverse=True))
        pieces = [piece for piece in re.split(f"({pattern})", text) if piece]
        return " ".join(self._token(piece) if piece in self._special_tokens else quoted(piece) for piece in pieces)

    def _token(self, text: str) -> str:
        return f"<[{self._special_tokens[text]}]>"

    def rule(self, body: str, attributes: str = "", name: str = "part") -> str:
        """The name of a rule with this body."""
        return self._added(body, attributes, f"{name}_{len(self._rules)}")

    def terminal(self, body: str) -> str:
        return self._added(body, "", f"T_{len(self._rules)}")

    def _added(self, body: str, attributes: str, name: str) -> str:
        key = f"{attributes}: {body}" if name.islower() else f"T: {body}"
        if key not in self._names:
            self._names[key] = name
            self._rules[name] = f"{name}{f'[{attributes}]' if attributes else ''}: {body}"
        return self._names[key]

    def define(self, name: str, body: str) -> None:
        """A rule under a name of the caller's."""
        self._rules[name] = f"{name}: {body}"

    def json(self, schema: Mapping[str, object]) -> str:
        """A rule for JSON that an exact schema describes."""
        return self.rule(f"%json {json.dumps({**schema, 'x-guidance': JSON_OPTIONS})}", name="json")

    def text_without(self, markers: Sequence[str]) -> str:
        """A terminal for text in which none of the markers stands."""
        if not markers:
            return self.terminal(ANY_TEXT)
        pattern = "|".join(regex_quoted(marker) for marker in markers)
        return self.terminal(f"{ANY_TEXT} & ~/(?s:.*)({pattern})(?s:.*)/")

    def text_up_to(self, marker: str, others: Sequence[str] = ()) -> str:
        """A rule for text that ends with its first marker."""
        if self.is_token(marker):
            return self.rule(f"{self.text_without([marker, *others])} {self._token(marker)}")
        return self.rule(f"{self.text_without(others)} {quoted(marker)}", "lazy")

    def text_up_to_within(self, marker: str, tokens_max: int) -> str:
        """The same with a limit on the tokens before the marker, which must be a token."""
        text = self.rule(self.text_without([marker]), f"max_tokens={tokens_max}")
        return self.rule(f"{text} {self._token(marker)}")

    def written(self, start: str) -> str:
        return "\n".join([f"start: {start}", *self._rules.values(), LINE, ""])


def quoted(text: str) -> str:
    """A literal of text."""
    return json.dumps(text)


def regex_quoted(text: str) -> str:
    """The text as a regular expression between slashes."""
    return "".join(char if char.isalnum() and char.isascii() else f"\\x{{{ord(char):x}}}" for char in text)
