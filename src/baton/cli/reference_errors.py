"""docs/reference/errors.md, from the catalogue of error codes."""

from __future__ import annotations

from baton.api.error_catalogue import ErrorEntry, error_entries
from baton.core.engine.request import FinishReason
from baton.core.handover.faults import PdStage

_FINISH_MEANINGS = {
    FinishReason.STOP: "A stop token or stop string, or the end of the text.",
    FinishReason.LENGTH: "`max_tokens` or the context is used up.",
    FinishReason.ABORT: "The request was cancelled by its id.",
    FinishReason.ERROR: "Never shown: it becomes the error `request_failed`.",
    FinishReason.RESCHEDULE: "Only with `--on-preempt reschedule`: `error` has `code`, `stage` and `generated_token_ids`.",
    FinishReason.CONSTRAINT_FAILED: "Never shown: it becomes the error `constraint_failed`.",
}
"""Answers with calls end with `tool_calls` in place of `stop`."""
_INTRODUCTION = """\
An error is `{"error": {"message", "type", "param", "code"}}`; at `/v1/messages` it has Anthropic's shape with the same \
further fields. In a stream the same object is one `error` event. With 429 and 503 comes `Retry-After`, where a time is \
known. Some errors have `retryable` in the object too. What to look at and what to do, code by code: \
[the runbook](../runbook.md)."""
_HAND_OVER = """\
A router that has run out of instances or retries, and a decode instance with `--on-preempt reschedule`, name the code of \
the hand-over as a number. The message is `PD Error CODE (STAGE): REASON`; stages are {stages}."""


def errors_page(generated: str) -> str:
    """`generated`: the line that says how the page is made."""
    entries = list(error_entries())
    stages = ", ".join(f"`{stage.value}`" for stage in PdStage)
    parts = [
        "# Errors",
        generated,
        _INTRODUCTION,
        "## Codes",
        _table([entry for entry in entries if not entry.code.isdigit()]),
        "## Codes of hand-overs",
        _HAND_OVER.format(stages=stages),
        _table([entry for entry in entries if entry.code.isdigit()]),
        "## Finish reasons",
        "\n".join(
            (
                "| `finish_reason` | Meaning |",
                "|---|---|",
                *(f"| `{one.value}` | {_FINISH_MEANINGS[one]} |" for one in FinishReason),
            )
        ),
    ]
    return "\n\n".join(parts) + "\n"


def _table(entries: list[ErrorEntry]) -> str:
    lines = [
        f"| `{entry.code}` | {', '.join(map(str, entry.statuses))} | {entry.again.value} | {entry.meaning} |"
        for entry in entries
    ]
    return "\n".join(("| `code` | Status | Send it again | Meaning |", "|---|---|---|---|", *lines))
