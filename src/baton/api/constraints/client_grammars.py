"""Grammars of clients, in Lark's form or in GBNF, written anew with names of our own.

Supported are rules, terminals, strings, ranges of characters, regular expressions, groups and repetitions, and Lark's common
terminals by `%import`. Directives, attributes, templates, priorities, tokens of the model and flags are refused by name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from baton.api.constraints.lark_text import LarkText, quoted
from baton.api.constraints.patterns import PatternRefused, code_written, whole_text_pattern
from baton.api.constraints.wanted import ConstraintRefused

CHARS_MAX = 64 << 10
DEPTH_MAX = 50
RULES_MAX = 500
"""With terminals. llguidance recurses over chains of rules, with about 3 KiB of stack for each."""
COMMON = {
    "DIGIT": "[0-9]",
    "HEXDIGIT": "[0-9A-Fa-f]",
    "INT": "[0-9]+",
    "SIGNED_INT": "[+-]?[0-9]+",
    "DECIMAL": r"[0-9]+\.[0-9]*|\.[0-9]+",
    "FLOAT": r"[0-9]+[eE][+-]?[0-9]+|([0-9]+\.[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?",
    "NUMBER": r"([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?",
    "SIGNED_NUMBER": r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?",
    "LCASE_LETTER": "[a-z]",
    "UCASE_LETTER": "[A-Z]",
    "LETTER": "[A-Za-z]",
    "WORD": "[A-Za-z]+",
    "CNAME": "[A-Za-z_][A-Za-z_0-9]*",
    "ESCAPED_STRING": r'"([^"\\\n]|\\[^\n])*"',
    "NEWLINE": r"(\r?\n)+",
    "WS_INLINE": r"[ \t]{1,8}",
    "WS": r"[ \t\f\r\n]{1,8}",
}
"""Lark's own. White space is bounded."""

_LARK = re.compile(
    r"""(?P<space>\s+|//[^\n]*|\#[^\n]*)
    |(?P<string>"(?:[^"\\\n]|\\.)*"i?)
    |(?P<regex>/(?:[^/\\\n]|\\.)+/[a-z]*)
    |(?P<directive>%[A-Za-z_]+)
    |(?P<range>\.\.)|(?P<alias>->)
    |(?P<name>[?!]?[A-Za-z_][A-Za-z0-9_]*)
    |(?P<count>\{[0-9]*,?[0-9]*\}|~\s*[0-9]+(?:\s*\.\.\s*[0-9]+)?)
    |(?P<sign>[:|()\[\]*+?.,])""",
    re.VERBOSE,
)
_ESCAPE = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|(.))", re.DOTALL)
"""One escape of a string, so that a backslash that is escaped begins none."""
_GBNF = re.compile(
    r"""(?P<space>\s+|\#[^\n]*)
    |(?P<string>"(?:[^"\\\n]|\\.)*")
    |(?P<regex>\[(?:[^\]\\\n]|\\.)*\]|\.)
    |(?P<defines>::=)
    |(?P<name>[A-Za-z_][A-Za-z0-9_-]*)
    |(?P<count>\{[0-9]*,?[0-9]*\})
    |(?P<sign>[|()*+?])""",
    re.VERBOSE,
)


@dataclass(frozen=True, slots=True)
class Lexeme:
    kind: str
    text: str
    line: int


def lark_rule(lark: LarkText, text: str, field: str) -> str:
    """The name of a rule that stands for the client's grammar."""
    if len(text) > CHARS_MAX:
        raise ConstraintRefused(field, "", f"the grammar has more than {CHARS_MAX} characters")
    is_gbnf = "::=" in text
    return _ClientGrammar(lark, _lexemes(text, is_gbnf, field), is_gbnf, field).write()


def _lexemes(text: str, is_gbnf: bool, field: str) -> list[Lexeme]:
    found: list[Lexeme] = []
    at, line = 0, 1
    while at < len(text):
        match = (_GBNF if is_gbnf else _LARK).match(text, at)
        if match is not None and match.lastgroup == "directive" and match[0] != "%import":
            raise ConstraintRefused(field, f"line {line}", f"the grammar has {match[0]!r}, which is not supported")
        if match is None:
            what = "a token of the model (<…>)" if text[at] == "<" else repr(text[at])
            raise ConstraintRefused(field, f"line {line}", f"the grammar has {what}, which is not supported here")
        if match.lastgroup != "space":
            found.append(Lexeme(match.lastgroup or "", match[0], line))
        line += match[0].count("\n")
        at = match.end()
    return found


class _ClientGrammar:
    def __init__(self, lark: LarkText, lexemes: Sequence[Lexeme], is_gbnf: bool, field: str) -> None:
        self._lark = lark
        self._lexemes = lexemes
        self._at = 0
        self._is_gbnf = is_gbnf
        self._field = field
        self._depth = 0
        self._names: dict[str, str] = {}
        self._bodies: dict[str, str] = {}

    def write(self) -> str:
        while self._at < len(self._lexemes):
            if self._lexemes[self._at].kind == "directive":
                self._directive()
            else:
                self._definition()
        start = "root" if self._is_gbnf else "start"
        if start not in self._bodies:
            raise self._refused(f"has no rule {start!r}")
        for name in self._names:
            if name not in self._bodies and name not in COMMON:
                raise self._refused(f"uses {name!r}, which it does not define")
        for name, body in self._bodies.items():
            self._lark.define(self._own_name(name), body)
        return self._own_name(start)

    def _refused(self, reason: str) -> ConstraintRefused:
        line = self._lexemes[min(self._at, len(self._lexemes) - 1)].line if self._lexemes else 1
        return ConstraintRefused(self._field, f"line {line}", f"the grammar {reason}")

    def _peek(self, *texts: str) -> bool:
        return self._at < len(self._lexemes) and self._lexemes[self._at].text in texts

    def _kind(self, ahead: int = 0) -> str:
        at = self._at + ahead
        return self._lexemes[at].kind if at < len(self._lexemes) else ""

    def _next(self) -> Lexeme:
        if self._at >= len(self._lexemes):
            raise self._refused("ends in the middle")
        self._at += 1
        return self._lexemes[self._at - 1]

    def _own_name(self, name: str) -> str:
        is_terminal = not self._is_gbnf and name.lstrip("_")[:1].isupper()
        kind = "CLIENT" if is_terminal else "client"
        return self._names.setdefault(name, f"{kind}_{len(self._names)}")

    def _directive(self) -> None:
        """Only `%import common.NAME`."""
        word = self._next().text
        names = [lexeme.text for lexeme in self._lexemes[self._at : self._at + 3]]
        if word != "%import" or len(names) < 3 or names[:2] != ["common", "."] or names[2] not in COMMON:
            raise self._refused(f"has {word!r}: only '%import common.NAME' of Lark's common terminals is supported")
        self._at += 3
        self._bodies[names[2]] = f"/{whole_text_pattern(COMMON[names[2]], is_search=False)}/"
        self._own_name(names[2])

    def _definition(self) -> None:
        name = self._next()
        sign = self._next() if self._at < len(self._lexemes) else name
        if name.kind != "name" or sign.text != ("::=" if self._is_gbnf else ":"):
            what = "attributes, templates and priorities are not supported" if sign.text in "[{.(" else "a rule was expected"
            raise self._refused(f"has {name.text + ' ' + sign.text!r}: {what}")
        plain = name.text.lstrip("?!")
        if plain in self._bodies:
            raise self._refused(f"defines {plain!r} twice")
        if len(self._bodies) >= RULES_MAX:
            raise self._refused(f"has more than {RULES_MAX} rules")
        self._own_name(plain)
        self._bodies[plain] = self._either()

    def _begins_definition(self) -> bool:
        at = self._at + 1
        sign = "::=" if self._is_gbnf else ":"
        return self._kind() == "directive" or (
            self._kind() == "name" and at < len(self._lexemes) and self._lexemes[at].text == sign
        )

    def _either(self) -> str:
        self._depth += 1
        if self._depth > DEPTH_MAX:
            raise self._refused(f"has more than {DEPTH_MAX} groups within each other")
        ways = [self._sequence()]
        while self._peek("|"):
            self._at += 1
            ways.append(self._sequence())
        self._depth -= 1
        return " | ".join(ways)

    def _sequence(self) -> str:
        parts: list[str] = []
        while self._at < len(self._lexemes) and not self._peek("|", ")", "]") and not self._begins_definition():
            if self._kind() == "alias":
                self._at += 2
                continue
            parts.append(self._repeated())
        return " ".join(parts) or '""'

    def _repeated(self) -> str:
        part = self._one()
        while self._peek("*", "+", "?") or self._kind() == "count":
            text = self._next().text
            if text[0] == "~":
                bounds = [number.strip() for number in text[1:].split("..")]
                text = f"{{{bounds[0]},{bounds[-1]}}}"
            is_regex = part.startswith("/") and part.endswith("/") and self._is_gbnf
            part = f"/(?:{part[1:-1]}){text}/" if is_regex else f"({part}){text}"
        return part

    def _one(self) -> str:
        lexeme = self._next()
        match lexeme.kind:
            case "string":
                return self._string(lexeme)
            case "regex":
                return self._regex(lexeme)
            case "name":
                return self._own_name(lexeme.text)
            case "sign" if lexeme.text in ("(", "["):
                inner = self._either()
                if not self._peek(")" if lexeme.text == "(" else "]"):
                    raise self._refused("has a bracket that is not closed")
                self._at += 1
                return f"({inner})" if lexeme.text == "(" else f"({inner})?"
            case _:
                raise self._refused(f"has {lexeme.text!r} where it is not supported")

    def _string(self, lexeme: Lexeme) -> str:
        if lexeme.text.endswith("i"):
            raise self._refused("has a string with the flag 'i', which is not supported")
        text = self._value(lexeme)
        if self._kind() != "range":
            return quoted(text)
        self._at += 1
        end = self._value(self._next())
        if len(text) != 1 or len(end) != 1 or end < text:
            raise self._refused("has a range that is not between two characters")
        return f"/[{code_written(ord(text))}-{code_written(ord(end))}]/"

    def _value(self, lexeme: Lexeme) -> str:
        try:
            value = json.loads(_ESCAPE.sub(_json_escape, lexeme.text), strict=False)
        except ValueError:
            raise self._refused(f"has the string {lexeme.text[:40]}, whose escapes are not supported") from None
        return str(value)

    def _regex(self, lexeme: Lexeme) -> str:
        source = lexeme.text
        if not self._is_gbnf:
            source, _, flags = source[1:].rpartition("/")
            if flags:
                raise self._refused(f"has a regular expression with flags ({flags!r}), which are not supported")
            source = source.replace("\\/", "/")
        elif source == ".":
            source = r"[^\n]"
        try:
            return f"/{whole_text_pattern(source, is_search=False)}/"
        except PatternRefused as error:
            raise self._refused(f"has a regular expression that {error}") from None


def _json_escape(escape: re.Match[str]) -> str:
    """An escape of Lark or GBNF as JSON has it."""
    if escape[1] is not None:
        return f"\\u00{escape[1]}"
    return "'" if escape[2] == "'" else escape[0]
