"""The two forms of log lines: text, and one JSON object a line for those who collect logs.

    {"time": "2026-01-31T12:00:00.123+00:00", "level": "INFO", "logger": "baton.access", "message": "id=r-1 status=200 …",
     "fields": {"id": "r-1", "status": 200, …}}

`fields` has the `name=value` pairs of lines about requests and the engine's state; `exception` a traceback. Lines for the
operator have the logger `baton`.
"""

from __future__ import annotations

import logging
import re
from datetime import UTC, datetime
from typing import Any

import msgspec

from baton.node.settings import LogFormat

TEXT = "%(asctime)s %(levelname)s %(name)s %(message)s"
OPERATOR = "baton"
"""The logger of lines for the operator."""
NAMES = frozenset(("id", "path", "tenant", "client", "finish", "error", "instance", "from", "to"))
_INTEGER, _DECIMAL = re.compile(r"-?[0-9]{1,15}"), re.compile(r"-?[0-9]{1,15}\.[0-9]{1,9}")
WITH_FIELDS = frozenset(("baton.access", "baton.engine", "baton.moves"))


class JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        message = record.getMessage()
        more: dict[str, object] = {}
        if record.name in WITH_FIELDS:
            more["fields"] = fields_of(_encodable(message))
        if record.exc_info:
            more["exception"] = _encodable(self.formatException(record.exc_info))
        return json_line(message, record.levelname, record.name, record.created, more)


def formatter_of(log_format: LogFormat) -> logging.Formatter:
    return JsonLines() if log_format is LogFormat.JSON else logging.Formatter(TEXT)


def json_line(
    message: str, level: str, logger: str, created_s: float | None = None, more: dict[str, object] | None = None
) -> str:
    """`created_s`: by the wall clock; None: now."""
    now = datetime.now(UTC) if created_s is None else datetime.fromtimestamp(created_s, UTC)
    time = now.isoformat(timespec="milliseconds")
    line = {"time": time, "level": level, "logger": logger, "message": _encodable(message)} | (more or {})
    return msgspec.json.encode(line).decode()


def _encodable(text: str) -> str:
    """Bytes that are no text, as in the name of a file, are escaped."""
    return text.encode(errors="backslashreplace").decode()


def object_of(line: str) -> dict[str, Any] | None:
    """The object of a line of JSON; None for every other line."""
    try:
        found = msgspec.json.decode(line)
    except (msgspec.DecodeError, RecursionError):
        return None
    return found if isinstance(found, dict) and {"time", "level", "logger", "message"} <= found.keys() else None


def as_text(line: str) -> str:
    """A line of either form as text; other lines as they are."""
    found = object_of(line)
    if found is None:
        return line
    if found["logger"] == OPERATOR:
        return str(found["message"])
    return f"{found['time']} {found['level']} {found['logger']} {found['message']}"


def fields_of(message: str) -> dict[str, str | int | float]:
    """The `name=value` pairs of a message; numbers as numbers, but names stay text, whatever they look like."""
    pairs = (word.partition("=") for word in message.split(" "))
    return {name: value if name in NAMES else _value(value) for name, equals, value in pairs if equals}


def _value(text: str) -> str | int | float:
    if _INTEGER.fullmatch(text):
        return int(text)
    return float(text) if _DECIMAL.fullmatch(text) else text
