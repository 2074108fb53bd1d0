"""Regular expressions of JSON schemas (ECMA-262), written anew in the few forms that every engine reads alike.

The result describes the whole text: anchors are resolved, classes are spelled out as ranges, groups capture nothing. What no
automaton can do (looking around, references back, word borders) is refused by name. Where engines differ, what is written
anew matches no more than either: `.` excludes all ends of lines, `\\s` and `\\S` leave out what only some call white space.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TypeAlias

CHARS_MAX = 8_192
DEPTH_MAX = 50
"""Groups within each other."""
REPEATS_MAX = 10_000
ALTERNATIVES_MAX = 256
"""Ways through a pattern that has anchors inside groups."""
LAST = 0x10FFFF
Ranges: TypeAlias = tuple[tuple[int, int], ...]
UNWRITABLE: Ranges = ((0x00, 0x07), (0x0B, 0x0B), (0x0E, 0x1F), (0x7F, 0x7F), (0xD800, 0xDFFF))
"""Characters that our JSON never has: without a short escape, or halves of others."""
ANY_TEXT = "(?s:.*)"


class PatternRefused(Exception):
    """The message says what is not supported, or wrong."""


@dataclass(frozen=True, slots=True)
class Chars:
    """One character. `properties`: Unicode classes such as \\p{L}, taken over as they are."""

    ranges: Ranges
    properties: tuple[str, ...] = ()
    is_negated: bool = False


@dataclass(frozen=True, slots=True)
class Joined:
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Either:
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    part: Part
    least: int
    most: int | None


@dataclass(frozen=True, slots=True)
class Anchor:
    is_start: bool


Part: TypeAlias = Chars | Joined | Either | Repeat | Anchor

DIGITS: Ranges = ((0x30, 0x39),)
WORD: Ranges = ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
SURE_SPACE: Ranges = (
    (0x09, 0x0D),
    (0x20, 0x20),
    (0xA0, 0xA0),
    (0x1680, 0x1680),
    (0x2000, 0x200A),
    (0x2028, 0x2029),
    (0x202F, 0x202F),
    (0x205F, 0x205F),
    (0x3000, 0x3000),
)
DOUBTFUL_SPACE: Ranges = ((0x1C, 0x1F), (0x85, 0x85), (0x180E, 0x180E), (0xFEFF, 0xFEFF))
LINE_ENDS: Ranges = ((0x0A, 0x0A), (0x0D, 0x0D), (0x85, 0x85), (0x2028, 0x2029))
_CONTROLS = {"t": 9, "n": 10, "v": 11, "f": 12, "r": 13}
_QUANTIFIER = re.compile(r"\{(\d{1,6})(?:(,)(\d{1,6})?)?\}")
_PROPERTY = re.compile(r"\{[A-Za-z_]{1,40}(?:=[A-Za-z_]{1,40})?\}|[A-Z]")


def merged(ranges: Sequence[tuple[int, int]]) -> Ranges:
    """In order, without overlaps."""
    found: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if found and low <= found[-1][1] + 1:
            found[-1] = (found[-1][0], max(found[-1][1], high))
        else:
            found.append((low, high))
    return tuple(found)


def inverted(ranges: Sequence[tuple[int, int]]) -> Ranges:
    found, start = [], 0
    for low, high in merged(ranges):
        if low > start:
            found.append((start, low - 1))
        start = high + 1
    if start <= LAST:
        found.append((start, LAST))
    return tuple(found)


CLASSES: dict[str, Ranges] = {
    "d": DIGITS,
    "D": inverted(DIGITS),
    "w": WORD,
    "W": inverted(WORD),
    "s": SURE_SPACE,
    "S": inverted((*SURE_SPACE, *DOUBTFUL_SPACE)),
}
NEGATED_CLASSES = CLASSES | {"s": (*SURE_SPACE, *DOUBTFUL_SPACE), "S": inverted(SURE_SPACE)}
"""In a class that is negated, where more excludes more."""


class PatternReader:
    """Reads one pattern; raises PatternRefused."""

    def __init__(self, pattern: str) -> None:
        if len(pattern) > CHARS_MAX:
            raise PatternRefused(f"has more than {CHARS_MAX} characters")
        self._text = pattern
        self._at = 0
        self._depth = 0

    def read(self) -> Part:
        found = self._either()
        if self._at < len(self._text):
            raise PatternRefused("has a closing bracket without an opening one")
        return found

    def _peek(self, text: str) -> bool:
        return self._text.startswith(text, self._at)

    def _take(self, text: str) -> bool:
        if not self._peek(text):
            return False
        self._at += len(text)
        return True

    def _next(self) -> str:
        if self._at >= len(self._text):
            raise PatternRefused("ends in the middle")
        self._at += 1
        return self._text[self._at - 1]

    def _either(self) -> Part:
        parts = [self._sequence()]
        while self._take("|"):
            parts.append(self._sequence())
        return parts[0] if len(parts) == 1 else Either(tuple(parts))

    def _sequence(self) -> Part:
        parts: list[Part] = []
        while self._at < len(self._text) and self._text[self._at] not in "|)":
            parts.append(self._repeated(self._one()))
        return parts[0] if len(parts) == 1 else Joined(tuple(parts))

    def _repeated(self, part: Part) -> Part:
        while True:
            least, most = self._quantifier()
            if least < 0:
                return part
            if max(least, most or 0) > REPEATS_MAX:
                raise PatternRefused(f"repeats more than {REPEATS_MAX} times")
            if most is not None and least > most:
                raise PatternRefused("has a quantifier whose bounds are reversed")
            if self._take("+"):
                raise PatternRefused("has a possessive quantifier, which is not supported")
            self._take("?")  # lazy: which text is found differs, not whether one is
            part = Repeat(part, least, most)

    def _quantifier(self) -> tuple[int, int | None]:
        """Bounds; -1: there is none here."""
        for sign, bounds in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if self._take(sign):
                return bounds
        found = _QUANTIFIER.match(self._text, self._at)
        if found is None:
            return -1, None
        self._at = found.end()
        least = int(found[1])
        return least, (int(found[3]) if found[3] else None) if found[2] else least

    def _one(self) -> Part:
        char = self._next()
        match char:
            case "(":
                return self._group()
            case "[":
                return self._class()
            case ".":
                return Chars(inverted(LINE_ENDS))
            case "^":
                return Anchor(is_start=True)
            case "$":
                return Anchor(is_start=False)
            case "\\":
                return self._escape()
            case "*" | "+" | "?":
                raise PatternRefused("has a quantifier that follows nothing")
            case _:
                return _char(ord(char))

    def _group(self) -> Part:
        if self._take("?"):
            self._group_kind()
        self._depth += 1
        if self._depth > DEPTH_MAX:
            raise PatternRefused(f"has more than {DEPTH_MAX} groups within each other")
        inner = self._either()
        self._depth -= 1
        if not self._take(")"):
            raise PatternRefused("has a bracket that is not closed")
        return inner if not isinstance(inner, Joined) else Joined((inner,))

    def _group_kind(self) -> None:
        for sign, name in (("=", "a lookahead"), ("!", "a lookahead"), ("<=", "a lookbehind"), ("<!", "a lookbehind")):
            if self._peek(sign):
                raise PatternRefused(f"has {name}, which is not supported")
        if self._take(":"):
            return
        named = re.compile(r"P?<[A-Za-z_$][\w$]{0,99}>").match(self._text, self._at)
        if named is None:
            raise PatternRefused("has a group with flags or of a kind that is not supported")
        self._at = named.end()

    def _escape(self) -> Part:
        char = self._next()
        if char in "bB":
            raise PatternRefused(f"has a word border (\\{char}), which is not supported")
        if char in "123456789k":
            raise PatternRefused("has a backreference, which is not supported")
        if char in "pP":
            return Chars((), (self._property(char),))
        return Chars(CLASSES[char]) if char in CLASSES else _char(self._escaped(char))

    def _property(self, char: str) -> str:
        found = _PROPERTY.match(self._text, self._at)
        if found is None:
            raise PatternRefused(f"has a \\{char} without the name of a class")
        self._at = found.end()
        return f"\\{char}{found[0]}"

    def _escaped(self, char: str) -> int:
        """The code point of an escape of one character."""
        if char in _CONTROLS:
            return _CONTROLS[char]
        if char == "0" and not self._text[self._at : self._at + 1].isdigit():
            return 0
        if char == "c" and re.match(r"[A-Za-z]", self._text[self._at : self._at + 1]):
            return ord(self._next()) % 32
        if char == "x":
            return self._hex(2)
        if char == "u":
            return self._unicode()
        if char.isalnum():
            raise PatternRefused(f"has the escape \\{char}, which is not supported")
        return ord(char)

    def _hex(self, digits: int) -> int:
        text = self._text[self._at : self._at + digits]
        if not re.fullmatch(rf"[0-9A-Fa-f]{{{digits}}}", text):
            raise PatternRefused("has an escape without its digits")
        self._at += digits
        return int(text, 16)

    def _unicode(self) -> int:
        braced = re.compile(r"\{([0-9A-Fa-f]{1,6})\}").match(self._text, self._at)
        if braced is not None:
            self._at = braced.end()
            if int(braced[1], 16) > LAST:
                raise PatternRefused("has an escape beyond Unicode")
            return int(braced[1], 16)
        first = self._hex(4)
        pair = re.compile(r"\\u([dD][c-fC-F][0-9A-Fa-f]{2})").match(self._text, self._at)
        if 0xD800 <= first < 0xDC00 and pair is not None:
            self._at = pair.end()
            return 0x10000 + ((first - 0xD800) << 10) + int(pair[1], 16) - 0xDC00
        return first

    def _class(self) -> Part:
        is_negated = self._take("^")
        ranges: list[tuple[int, int]] = []
        properties: list[str] = []
        classes = NEGATED_CLASSES if is_negated else CLASSES
        while not self._take("]"):
            low = self._class_item(classes, ranges, properties)
            if low is None:
                continue
            high = low
            if self._peek("-") and not self._peek("-]"):
                self._at += 1
                end = self._class_item(classes, ranges, properties)
                if end is None:
                    raise PatternRefused("has a range of characters that ends with a class")
                high = end
            if high < low:
                raise PatternRefused("has a range of characters that is reversed")
            ranges.append((low, high))
        if properties:
            return Chars(merged(ranges), tuple(properties), is_negated)
        return Chars(inverted(ranges) if is_negated else merged(ranges))

    def _class_item(self, classes: Mapping[str, Ranges], ranges: list[tuple[int, int]], properties: list[str]) -> int | None:
        """A code point; None: a class, which was added."""
        char = self._next()
        if char == "[" and self._text[self._at : self._at + 1] in (":", "=", "."):
            raise PatternRefused("has a POSIX class, which is not supported")
        if char != "\\":
            if char in "&-~" and self._peek(char):
                raise PatternRefused(f"has {char + char!r} inside a class, which engines read differently")
            return ord(char)
        char = self._next()
        if char in classes:
            ranges += classes[char]
        elif char in "pP":
            properties.append(self._property(char))
        else:
            return 8 if char == "b" else self._escaped(char)
        return None


def _char(code: int) -> Chars:
    return Chars(((code, code),))


def whole_text_pattern(pattern: str, is_search: bool = True) -> str:
    """A pattern of whole texts. `is_search`: the given one may match anywhere in a text, as in JSON schemas."""
    ways = [_anchored(way, is_search) for way in _ways(PatternReader(pattern).read())]
    return _written(Either(tuple(ways))) if len(ways) > 1 else _written(ways[0])


def _has_anchor(part: Part) -> bool:
    match part:
        case Anchor():
            return True
        case Joined(parts) | Either(parts):
            return any(map(_has_anchor, parts))
        case Repeat(inner):
            return _has_anchor(inner)
        case _:
            return False


def _ways(part: Part) -> list[tuple[Part, ...]]:
    """Alternatives, each without anchors inside its parts."""
    if not _has_anchor(part):
        return [(part,)]
    match part:
        case Either(parts):
            found = [way for inner in parts for way in _ways(inner)]
        case Joined(parts):
            found = [()]
            for inner in parts:
                found = [(*way, *more) for way, more in product(found, _ways(inner))]
                _check_ways(found)
        case Repeat(inner, least, most) if most == 1:
            found = [*([()] if not least else []), *_ways(inner)]
        case Repeat():
            raise PatternRefused("has an anchor inside a repeated group, which is not supported")
        case _:
            found = [(part,)]
    _check_ways(found)
    return found


def _check_ways(ways: Sequence[object]) -> None:
    if len(ways) > ALTERNATIVES_MAX:
        raise PatternRefused("has too many alternatives with anchors")


_ALL = Repeat(Chars(((0, LAST),)), 0, None)


def _anchored(way: tuple[Part, ...], is_search: bool) -> Part:
    parts = list(way)
    starts, ends = not is_search, not is_search
    while parts and parts[0] == Anchor(is_start=True):
        parts, starts = parts[1:], True
    while parts and parts[-1] == Anchor(is_start=False):
        parts, ends = parts[:-1], True
    if any(isinstance(part, Anchor) for part in parts):
        raise PatternRefused("has an anchor (^ or $) in the middle, which is not supported")
    return Joined((*([] if starts else [_ALL]), *parts, *([] if ends else [_ALL])))


def _written(part: Part) -> str:
    match part:
        case Chars():
            return _chars_written(part)
        case Joined(parts):
            return "".join(_written(inner) if not isinstance(inner, Either) else f"(?:{_written(inner)})" for inner in parts)
        case Either(parts):
            return "|".join(map(_written, parts)) if len(parts) > 1 else _written(parts[0])
        case Repeat(inner, least, most):
            if part == _ALL:
                return ANY_TEXT
            return f"(?:{_written(inner)}){{{least},{'' if most is None else most}}}"
        case _:
            raise PatternRefused("has an anchor in the middle, which is not supported")


def _chars_written(chars: Chars) -> str:
    ranges = chars.ranges if chars.is_negated else without(chars.ranges, UNWRITABLE)
    if not ranges and not chars.properties:
        raise PatternRefused("needs a control character, or one of an empty class")
    if len(ranges) == 1 and ranges[0][0] == ranges[0][1] and not chars.properties and not chars.is_negated:
        return code_written(ranges[0][0])
    inner = "".join(
        code_written(low) if low == high else f"{code_written(low)}-{code_written(high)}" for low, high in ranges
    )
    return f"[{'^' if chars.is_negated else ''}{inner}{''.join(chars.properties)}]"


def without(ranges: Ranges, excluded: Ranges) -> Ranges:
    return inverted((*inverted(ranges), *excluded))


def is_writable(text: str) -> bool:
    """Whether our JSON can have the text in a string."""
    return not any(low <= ord(char) <= high for char in text for low, high in UNWRITABLE)


def code_written(code: int) -> str:
    char = chr(code)
    return char if char.isascii() and char.isalnum() else f"\\x{{{code:x}}}"


def text_written(text: str) -> str:
    return "".join(code_written(ord(char)) for char in text)


EXCLUDED_LENGTH_MAX = 100


def other_than(values: Sequence[str]) -> str:
    """A pattern of all texts but these."""
    return _other_than(sorted(set(values)), 0)


def _other_than(values: Sequence[str], at: int) -> str:
    """Of the rests of the values behind the first characters, which are equal."""
    if at > EXCLUDED_LENGTH_MAX:
        raise PatternRefused(f"excludes a text of more than {EXCLUDED_LENGTH_MAX} characters")
    by_first: dict[str, list[str]] = {}
    for value in values:
        if len(value) > at:
            by_first.setdefault(value[at], []).append(value)
    others = _chars_written(Chars(inverted([(ord(char), ord(char)) for char in by_first])))
    ways = [f"{others}{ANY_TEXT}"]
    ways += [
        f"{code_written(ord(char))}(?:{_other_than(rest, at + 1)})" for char, rest in by_first.items() if is_writable(char)
    ]
    if all(len(value) > at for value in values):
        ways.append("")
    return "|".join(ways)
