"""What idempotency keys cost a router: streamed requests a second with thousands of records and with none, in turns.

In one process, with an application that only writes events: what is measured is the recording alone.
"""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import Annotated

import typer
from rich.console import Console
from starlette.types import Message, Receive, Scope, Send

from baton.api.paths import COMPLETION_PATH
from baton.api.responses import DONE
from baton.router.idempotency import HEADER, IdempotencyMiddleware
from benchmarks.options import JsonIfGiven, Pairs
from benchmarks.runner import (
    Columns,
    Experiment,
    Progress,
    Report,
    Rounds,
    median_ratio,
    notes_on_other_load,
    print_remarks,
    run_benchmark,
    shown_spread,
    table_of,
)

EVENT = b'data: {"choices":[{"index":0,"text":"x"}]}'.ljust(204) + b"\n\n"
Records = Annotated[int, typer.Option(min=1, max=100_000, help="Records that there are.")]
Requests = Annotated[int, typer.Option(min=1, help="Requests of a measurement.")]
Events = Annotated[int, typer.Option(min=1, help="Events of an answer.")]


class KeyedRequests:
    """Sends requests, each with a key that was not used before, and measures."""

    def __init__(self, events: int) -> None:
        """`events` of each answer."""
        self.events = events
        self.sent = 0
        self.middleware = IdempotencyMiddleware(self._answer, grace_s=1.0)

    async def _answer(self, _scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        for _ in range(self.events - 1):
            await send({"type": "http.response.body", "body": EVENT, "more_body": True})
            await asyncio.sleep(0)  # tokens come one after the other
        await send({"type": "http.response.body", "body": DONE, "more_body": False})

    async def ask(self) -> None:
        self.sent += 1
        scope: Scope = {
            "type": "http", "path": COMPLETION_PATH, "method": "POST", "state": {"tenant": "", "request_id": "r"},
            "headers": [(HEADER.lower().encode(), f"{self.sent:032d}".encode())],
        }  # fmt: skip
        bodies = iter([b"{}"])
        left = asyncio.Event()

        async def receive() -> Message:
            if (body := next(bodies, None)) is not None:
                return {"type": "http.request", "body": body, "more_body": False}
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            """A client that reads everything."""

        await self.middleware(scope, receive, send)

    async def requests_a_second(self, count: int) -> float:
        began_s = time.process_time()
        for _ in range(count):
            await self.ask()
        return count / (time.process_time() - began_s)


class IdempotencyReport(Report, kw_only=True):
    records: int
    events: int
    none: list[float]
    """Requests a CPU second with no record at the start of a measurement."""
    many: list[float]

    @property
    def ratio(self) -> float:
        """Of the rate with records to that without, within a round."""
        return median_ratio(self.many, self.none)


def idempotency(
    records: Records = 6000, requests: Requests = 300, events: Events = 17, pairs: Pairs = 5, json: JsonIfGiven = None
) -> None:
    """Requests a second through the idempotency middleware, with many records and with none."""
    run_benchmark(partial(_measured, records, requests, events, pairs), show, json)


def _measured(records: int, requests: int, events: int, pairs: int, progress: Progress) -> Experiment[IdempotencyReport]:
    def rate(before: int) -> float:
        async def run() -> float:
            keyed = KeyedRequests(events)
            for _ in range(before):
                await keyed.ask()
            return await keyed.requests_a_second(requests)

        return asyncio.run(run())

    def run() -> IdempotencyReport:
        rounds = Rounds(progress, pairs, look_s=0.2)
        taken = rounds.repeat("idempotency", {"none": partial(rate, 0), "many": partial(rate, records)})
        notes = notes_on_other_load(rounds.loads)
        return IdempotencyReport(records=records, events=events, none=taken["none"], many=taken["many"], notes=notes)

    return Experiment(2 * pairs, run)


COLUMNS: Columns[IdempotencyReport] = (
    ("records", lambda report: f"{report.records:,}"),
    ("requests/s with none", lambda report: shown_spread(report.none)),
    ("with so many", lambda report: shown_spread(report.many)),
    ("ratio", lambda report: f"{report.ratio:.2f}"),
)


def show(console: Console, report: IdempotencyReport) -> None:
    console.print(table_of(f"idempotency keys, answers of {report.events} events, one core", COLUMNS, [report]))
    print_remarks(console, report)
