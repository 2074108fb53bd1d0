"""Log lines as JSON."""

from __future__ import annotations

import json
import logging
import sys

from hypothesis import given
from hypothesis import strategies as st

from baton.node.log_lines import as_text, fields_of, formatter_of, json_line
from baton.node.settings import LogFormat


def record(name: str, message: str, **more: object) -> logging.LogRecord:
    made = logging.LogRecord(name, logging.INFO, "", 0, message, (), None)
    made.created = 1.5
    vars(made).update(more)
    return made


def test_a_line_of_a_request_has_its_fields_with_numbers_as_numbers() -> None:
    line = formatter_of(LogFormat.JSON).format(record("baton.access", "id=r-1 status=200 queue_ms=0.5 error=- ratio=nan"))
    assert json.loads(line) == {
        "time": "1970-01-01T00:00:01.500+00:00",
        "level": "INFO",
        "logger": "baton.access",
        "message": "id=r-1 status=200 queue_ms=0.5 error=- ratio=nan",
        "fields": {"id": "r-1", "status": 200, "queue_ms": 0.5, "error": "-", "ratio": "nan"},
    }


def test_a_traceback_is_in_the_same_line() -> None:
    try:
        raise ValueError("oh")
    except ValueError:
        line = formatter_of(LogFormat.JSON).format(record("baton.node", "it failed", exc_info=sys.exc_info()))
    assert "\n" not in line
    found = json.loads(line)
    assert found["exception"].splitlines()[-1] == "ValueError: oh"
    assert "fields" not in found


def test_names_stay_text_however_much_they_look_like_numbers() -> None:
    fields = fields_of("id=00123 tenant=123456e7 client=7 prompt=12 queue_ms=1.50 ratio=1_0 x=1e5 y=- z=")
    assert fields == {
        "id": "00123", "tenant": "123456e7", "client": "7", "prompt": 12, "queue_ms": 1.5, "ratio": "1_0", "x": "1e5",
        "y": "-", "z": "",
    }  # fmt: skip


def test_bytes_that_are_no_text_are_escaped() -> None:
    assert json.loads(json_line("no model at /tmp/\udcff", "ERROR", "baton"))["message"] == "no model at /tmp/\\udcff"
    line = formatter_of(LogFormat.JSON).format(record("baton.access", "id=\udcff"))
    assert json.loads(line)["fields"] == {"id": "\\udcff"}


@given(st.text())
def test_whatever_is_said_is_one_line_of_json(message: str) -> None:
    whole = message.encode(errors="replace").decode()
    for name in ("baton.access", "baton"):
        line = formatter_of(LogFormat.JSON).format(record(name, whole.replace("%", "%%")))
        assert "\n" not in line
        assert json.loads(line)["message"] == whole.replace("%", "%%")
    assert all("=" not in name for name in fields_of(whole))


def test_text_is_as_ever() -> None:
    assert formatter_of(LogFormat.TEXT).format(record("baton.node", "hello")).endswith("INFO baton.node hello")


def test_both_forms_are_read_as_text() -> None:
    assert as_text("2026-01-31 12:00:00,000 ERROR baton.node oh") == "2026-01-31 12:00:00,000 ERROR baton.node oh"
    assert " ERROR baton.node oh" in as_text(json_line("oh", "ERROR", "baton.node"))
    assert as_text(json_line("tiny is served at", "INFO", "baton")) == "tiny is served at"
    for strange in ('{"time": 1}', "[]", "{" * 9000, "7", ""):
        assert as_text(strange) == strange
