"""Request traces of real services, read line by line.

Owns the three file formats, told apart by their first line, and turns each into `TracedRequest`s:

    JSON lines   {"timestamp": ms, "input_length": n, "output_length": n, "hash_ids": [...]}       (Mooncake)
    CSV          TIMESTAMP,ContextTokens,GeneratedTokens                                            (Azure)
    CSV          num_prefill_tokens,num_decode_tokens,…                                             (etalon, ShareGPT)

A file that does not keep to its format is refused with the line and the column. Reading is lazy: memory does not grow
with the file.
"""

from __future__ import annotations

import csv
import gzip
import io
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import TextIO

import msgspec

HASH_BLOCK_TOKENS = 512
"""Prompt tokens that one hash id of a Mooncake trace stands for."""
LENGTH_MAX = 10_000_000
LINE_CHARS_MAX = 1_000_000
BUNCH_MAX = 100_000


class TraceMalformed(Exception):
    """The message starts with file, line and column."""

    def __init__(self, path: Path, line: int, column: str, problem: str) -> None:
        super().__init__(f"{path}, line {line}, column {column}: {problem}")


@dataclass(frozen=True, slots=True)
class TracedRequest:
    at_s: float | None
    """Seconds after the first request of the trace; None where the trace has no times."""
    input_tokens: int
    output_tokens: int
    prefix_blocks: tuple[int, ...] = ()
    """Chain of block ids: equal leading ids mean equal leading text."""


class _MooncakeLine(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int] = []


def read_trace(path: Path, limit: int | None = None) -> Iterator[TracedRequest]:
    """The requests of `path` (also .gz), at most `limit`."""
    with _open_text(path) as file:
        yield from islice(_from_zero(_parse(path, file)), limit)


def smear(requests: Iterable[TracedRequest]) -> Iterator[TracedRequest]:
    """Spread requests that share one timestamp evenly until the next timestamp.

    Traces whose clock ticks every few seconds would otherwise hit the server with bunches that never happened.
    """
    bunch: list[TracedRequest] = []
    for request in requests:
        if request.at_s is None:
            yield request
            continue
        if bunch and (request.at_s != bunch[0].at_s or len(bunch) == BUNCH_MAX):
            yield from _spread(bunch, request.at_s)
            bunch = []
        bunch.append(request)
    yield from bunch


def _spread(bunch: list[TracedRequest], until_s: float) -> Iterator[TracedRequest]:
    for place, request in enumerate(bunch):
        start_s = request.at_s or 0.0
        yield replace(request, at_s=start_s + (until_s - start_s) * place / len(bunch))


def _from_zero(requests: Iterator[TracedRequest]) -> Iterator[TracedRequest]:
    """Times start at zero and never run backwards: a request that was logged late is due at once."""
    first_s: float | None = None
    latest_s = 0.0
    for request in requests:
        if request.at_s is None:
            yield request
            continue
        if first_s is None:
            first_s = request.at_s
        latest_s = max(latest_s, request.at_s - first_s)
        yield replace(request, at_s=latest_s)


def _open_text(path: Path) -> TextIO:
    if path.suffix == ".gz":
        return io.TextIOWrapper(gzip.open(path, "rb"), encoding="utf-8", newline="")
    return path.open(encoding="utf-8", newline="")


def _parse(path: Path, file: TextIO) -> Iterator[TracedRequest]:
    lines = _lines(path, file)
    first = next(lines, None)
    if first is None:
        raise TraceMalformed(path, 1, "1", "the file is empty")
    if first.lstrip().startswith("{"):
        yield from _parse_mooncake(path, _chain(first, lines))
        return
    header = next(csv.reader([first]))
    if {"TIMESTAMP", "ContextTokens", "GeneratedTokens"} <= set(header):
        yield from _parse_csv(path, header, lines, _azure_row)
    elif {"num_prefill_tokens", "num_decode_tokens"} <= set(header):
        yield from _parse_csv(path, header, lines, _etalon_row)
    else:
        known = "TIMESTAMP,ContextTokens,GeneratedTokens or num_prefill_tokens,num_decode_tokens or JSON lines"
        raise TraceMalformed(path, 1, "1", f"unknown trace format {first.strip()[:80]!r}; expected {known}")


def _chain(first: str, rest: Iterator[str]) -> Iterator[str]:
    yield first
    yield from rest


def _lines(path: Path, file: TextIO) -> Iterator[str]:
    number = 0
    while True:
        number += 1
        try:
            line = file.readline(LINE_CHARS_MAX)
        except UnicodeDecodeError as error:
            raise TraceMalformed(path, number, "1", f"not UTF-8 text: {error.reason}") from error
        except (gzip.BadGzipFile, EOFError) as error:
            raise TraceMalformed(path, number, "1", f"damaged gzip file: {error}") from error
        if not line:
            return
        if len(line) == LINE_CHARS_MAX and not line.endswith("\n"):
            raise TraceMalformed(path, number, str(LINE_CHARS_MAX), "the line is too long")
        yield line


def _parse_mooncake(path: Path, lines: Iterator[str]) -> Iterator[TracedRequest]:
    decoder = msgspec.json.Decoder(_MooncakeLine)
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = decoder.decode(line)
        except msgspec.ValidationError as error:
            problem, _, where = str(error).partition(" - at `$.")
            raise TraceMalformed(path, number, where.rstrip("`") or "1", problem) from error
        except msgspec.DecodeError as error:
            raise TraceMalformed(path, number, "1", str(error)) from error
        yield TracedRequest(
            at_s=row.timestamp / 1000,
            input_tokens=_checked_length(path, number, "input_length", row.input_length),
            output_tokens=_checked_length(path, number, "output_length", row.output_length),
            prefix_blocks=tuple(row.hash_ids),
        )


@dataclass(frozen=True, slots=True)
class _Row:
    """One CSV row with its position, for error messages."""

    path: Path
    number: int
    cells: dict[str, str]

    def length(self, column: str) -> int:
        text = self.cells[column].strip()
        try:
            value = int(text)
        except ValueError:
            raise TraceMalformed(self.path, self.number, column, f"{text!r} is not a whole number") from None
        return _checked_length(self.path, self.number, column, value)

    def seconds(self, column: str) -> float:
        text = self.cells[column].strip()
        try:
            moment = datetime.fromisoformat(text)
        except ValueError:
            raise TraceMalformed(self.path, self.number, column, f"{text!r} is not a date and time") from None
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _azure_row(row: _Row) -> TracedRequest:
    return TracedRequest(row.seconds("TIMESTAMP"), row.length("ContextTokens"), row.length("GeneratedTokens"))


def _etalon_row(row: _Row) -> TracedRequest:
    return TracedRequest(None, row.length("num_prefill_tokens"), row.length("num_decode_tokens"))


def _parse_csv(
    path: Path, header: list[str], lines: Iterator[str], parse_row: Callable[[_Row], TracedRequest]
) -> Iterator[TracedRequest]:
    for number, line in enumerate(lines, start=2):
        if not line.strip():
            continue
        cells = next(csv.reader([line]))
        if len(cells) != len(header):
            column = header[len(cells)] if len(cells) < len(header) else str(len(header) + 1)
            raise TraceMalformed(path, number, column, f"{len(cells)} columns where the header has {len(header)}")
        yield parse_row(_Row(path, number, dict(zip(header, cells, strict=True))))


def _checked_length(path: Path, number: int, column: str, value: int) -> int:
    if not 0 <= value <= LENGTH_MAX:
        raise TraceMalformed(path, number, column, f"{value} is not a length between 0 and {LENGTH_MAX}")
    return value
