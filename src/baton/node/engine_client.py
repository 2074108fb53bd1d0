"""The front end's client of one engine: submits groups, passes each request's tokens to its stream.

Implements `api.engine.Engine`. All methods run on one event loop. `EngineProcess` has the process and the socket, the
RequestTable the state of every open ticket and request; here are the streams and the submitters that wait. When the engine
dies, every open stream and every pending submission ends with EngineDead and the reason.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

from baton.api.engine import (
    EngineDead,
    EngineInfo,
    Gauges,
    NotServing,
    TokenBurst,
    TokenStream,
)
from baton.api.original_request import OriginalRequest
from baton.core.engine.gauges import DraftGauges, KvEventTraffic, PeerTraffic, SchedulerGauges, StepSizes, StoreTraffic
from baton.core.engine.orders import Accepted, Drain, Submit
from baton.core.engine.request import Submission
from baton.core.errors import Refusal, RefusalCode, Refused, SetupError
from baton.core.start_stage import OnStage, no_stages
from baton.node.engine_launch import LaunchedEngine
from baton.node.engine_process import EngineProcess
from baton.node.phase_history import PhaseHistories, stream_of
from baton.node.settings import EngineSettings
from baton.node.token_streams import BufferedTokenStream, ended_of, logprobs_of
from baton.wire.engine_messages import (
    FRAME_BYTES_MAX,
    WIRE_VERSION,
    DrainBegun,
    FromEngine,
    Pulse,
    ReadyMessage,
    RefusedMessage,
    StepOutput,
    ToEngine,
    encode_to_engine,
    refused,
)
from baton.wire.request_table import (
    EngineFailed,
    EngineReady,
    GroupAccepted,
    GroupDeclined,
    News,
    RequestProgress,
    RequestTable,
    StepColumns,
)

BEHIND = Refusal(RefusalCode.QUEUE_FULL, "the engine does not keep up with its messages", retry_after_s=1)


class EngineSharer(Protocol):
    """Another user of this engine besides the submitters of this process: a router."""

    @property
    def open_requests(self) -> int: ...

    def owns_ticket(self, ticket: int) -> bool: ...

    def split(self, output: StepOutput) -> tuple[StepOutput | None, StepOutput | None]:
        """Split a step into the sharer's part and the rest."""

    def take(self, message: Accepted | RefusedMessage | StepOutput) -> None:
        """Take a message that belongs to the sharer."""

    def record_pulse(self, pulse: Pulse) -> None: ...


class EngineClient:
    def __init__(
        self, settings: EngineSettings, on_stage: OnStage = no_stages, launched: LaunchedEngine | None = None
    ) -> None:
        self._settings = settings
        self._process = EngineProcess(settings, self._take, self._die, on_stage, launched)
        self._table = RequestTable()
        self._sharer: EngineSharer | None = None
        self.histories: PhaseHistories | None = None
        """Where phases of own requests are noted, for traces; the engine tells them once it was ordered to (ReportChanges).
        None: no traces are made."""
        self._answers: dict[int, asyncio.Future[list[BufferedTokenStream[int]]]] = {}
        """By ticket: the answers that submitters wait for."""
        self._streams: dict[int, BufferedTokenStream[int]] = {}
        self._ready: asyncio.Future[ReadyMessage] = asyncio.get_running_loop().create_future()
        self._dead = asyncio.Event()
        self._request_closed = asyncio.Event()
        """Set whenever a request may have closed."""
        self._death: NotServing | None = None
        self._draining = False
        self._drain_begun = False
        """The engine has said that it drains."""
        self._gauges = SchedulerGauges()
        self.tokens_made = 0
        """Since the start, of all submitters."""
        self._drafts = DraftGauges()
        self._traffic = PeerTraffic()
        self._store_traffic = StoreTraffic()
        self._step_sizes = StepSizes()
        self._kv_event_traffic = KvEventTraffic()
        self.info = EngineInfo(context_tokens=0, vocabulary=0, slots=0, blocks=0, block_size=0)
        self.details = ""
        self.fingerprint = b""
        self.peer_address = ""

    def share(self, sharer: EngineSharer) -> None:
        """From now on pass messages that belong to the sharer to it."""
        self._sharer = sharer

    # ── life cycle ───────────────────────────────────────────────────────────────────────────────────────────────────────

    async def start(self) -> None:
        """Start the process; `wait_ready` says when it serves."""
        await self._process.start()

    async def wait_ready(self) -> None:
        """Raises SetupError where the engine cannot serve what was asked for, EngineDead where it failed otherwise."""
        ready = await self._ready
        if ready.version != WIRE_VERSION:
            raise EngineDead(f"the engine speaks version {ready.version} of the wire format, this front end {WIRE_VERSION}")
        self.info = EngineInfo(
            context_tokens=ready.context_tokens,
            vocabulary=ready.vocabulary,
            slots=ready.slots,
            blocks=ready.blocks,
            block_size=ready.block_size,
            prefix_cache=self._settings.prefix_cache,
        )
        self.details = ready.details
        self.fingerprint = ready.fingerprint
        self.peer_address = ready.peer_address

    def give_up(self, reason: str) -> None:
        """End every open request now."""
        self._die(NotServing(reason))

    def order_dump(self) -> None:
        """Have the engine write its last decisions to a file; from any thread. Before it is ready, there are none."""
        if self._ready.done():
            self._process.order_dump()

    async def wait_dead(self) -> str:
        await self._dead.wait()
        return str(self._death or "")

    async def close(self) -> None:
        """Stop the process and end every open request."""
        await self._process.close()
        self._die(NotServing("the engine was stopped"))

    def _die(self, why: NotServing) -> None:
        if self._death is not None:
            return
        self._death, reason = why, str(why)
        for lost in self._table.lose(reason):
            if lost.ticket is not None:
                self._answers.pop(lost.ticket).set_exception(EngineDead(reason))
            elif lost.serial is not None:
                self._streams.pop(lost.serial).fail(reason)
        if not self._ready.done():
            self._ready.set_exception(EngineDead(reason))
        self._dead.set()
        self._request_closed.set()

    # ── the Engine protocol ──────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def death(self) -> NotServing | None:
        return self._death

    @property
    def draining(self) -> bool:
        return self._draining

    @property
    def gauges(self) -> Gauges:
        return Gauges(
            self._gauges,
            self._drafts,
            self._traffic,
            self._store_traffic,
            self._step_sizes,
            stalls=int(self._death is not None and self._death.is_stall),
            kv_events=self._kv_event_traffic,
            role=self._settings.role,
            victim_policy=self._settings.victims,
        )

    @property
    def open_requests(self) -> int:
        return self._table.open_requests + (0 if self._sharer is None else self._sharer.open_requests)

    @property
    def silent_us(self) -> int:
        """Microseconds since the engine's last message or beat."""
        return self._process.silent_us

    @property
    def runs(self) -> bool:
        """Whether the process of a silent engine uses a CPU or waits for one."""
        return self._process.runs

    @property
    def stall_limit_us(self) -> int:
        return self._process.stall_limit_us

    async def wait_idle(self) -> None:
        """Wait until no request and no hand-over to a peer is open, and no KV is being copied to or from host memory or the
        store."""
        while self._death is None:
            is_old = self._draining and not self._drain_begun  # the gauges are older than the order to begin nothing more
            if not (is_old or self.open_requests or self._gauges.handovers.open or self._gauges.storage.transfers):
                return
            self._request_closed.clear()
            await self._request_closed.wait()

    async def submit(self, group: Sequence[Submission], origin: OriginalRequest | None = None) -> list[TokenStream]:  # noqa: ARG002
        self._refuse_if_dead()
        if self._process.is_behind:
            raise Refused(BEHIND)
        message = self._table.submit(group)
        answer = self._answers[message.ticket] = asyncio.get_running_loop().create_future()
        self._send_or_refuse(message)
        try:
            return list[TokenStream](await asyncio.shield(answer))
        except asyncio.CancelledError:
            self._abandon(message.ticket, answer)
            raise

    def _send_or_refuse(self, message: Submit) -> None:
        frame = encode_to_engine(message)
        if len(frame) <= FRAME_BYTES_MAX:
            self._process.send(frame)
            return
        text = f"the body makes a message of {len(frame)} bytes for the engine, which takes at most {FRAME_BYTES_MAX}"
        self._take(refused(message.ticket, Refusal(RefusalCode.GROUP_TOO_LARGE, text)))  # in place of the engine

    def _abandon(self, ticket: int, answer: asyncio.Future[list[BufferedTokenStream[int]]]) -> None:
        """The client left before it had its streams: requests that the engine accepts are aborted."""
        if not answer.done():
            self._table.abandon(ticket)
            del self._answers[ticket]
        elif answer.exception() is None:
            for stream in answer.result():
                stream.abort()

    def stop(self, serial: int, keep: int) -> None:
        self.post(self._table.stop(serial, keep))

    def abort(self, serial: int) -> None:
        self.post(self._table.cancel(serial))

    def drain(self) -> None:
        self._draining = True
        self.post(Drain())

    def post(self, message: ToEngine | None) -> None:
        """Send without waiting; None is ignored."""
        if message is not None and self._death is None:
            self._process.send(encode_to_engine(message))

    def forward(self, message: ToEngine) -> None:
        """Send for a sharer. Where the engine is behind, a submission is refused in its place."""
        if isinstance(message, Submit) and self._process.is_behind:
            self._take(refused(message.ticket, BEHIND))
        else:
            self.post(message)

    def _refuse_if_dead(self) -> None:
        if self._death is None:
            return
        if self._draining:  # while the server closes, the end was ordered and is not a fault
            raise Refused(Refusal(RefusalCode.DRAINING, "this instance is being stopped", retry_after_s=1))
        raise EngineDead(str(self._death))

    # ── messages ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _take(self, message: FromEngine) -> None:
        if isinstance(message, StepOutput):
            self.tokens_made += len(message.tokens) // 4  # four bytes per token
            self._drafts = DraftGauges(message.draft_tokens, message.accepted_draft_tokens)
        if isinstance(message, StepOutput | Pulse | DrainBegun):
            self._gauges = message.gauges
            self._drain_begun |= isinstance(message, DrainBegun)
            if self.histories is not None and isinstance(message, Pulse):
                self.histories.record(message.notes)
        elif isinstance(message, PeerTraffic):
            self._traffic = message
        elif isinstance(message, StoreTraffic):
            self._store_traffic = message
        elif isinstance(message, StepSizes):
            self._step_sizes = message
        elif isinstance(message, KvEventTraffic):
            self._kv_event_traffic = message
        own = message if self._sharer is None else _own_part(message, self._sharer)
        if own is not None:
            self._take_own(own)
        self._request_closed.set()

    def _take_own(self, message: FromEngine) -> None:
        effects = self._table.take(message)
        for order in effects.orders:
            self.post(order)
        for news in effects.news:
            self._handle_news(news)
        if effects.step is not None:
            self._deliver(effects.step)

    def _deliver(self, step: StepColumns) -> None:
        for row in step.rows():
            self._streams[row.serial].push(_burst_of(row))
            if row.ended is not None:
                del self._streams[row.serial]

    def _handle_news(self, news: News) -> None:
        match news:
            case GroupAccepted(ticket, serials):
                # Made here, not by the submitter: a short request may end before the submitter wakes up.
                streams = [stream_of(self, serial, self.histories) for serial in serials]
                self._streams.update(zip(serials, streams, strict=True))
                self._answers.pop(ticket).set_result(streams)
            case GroupDeclined(ticket, refusal):
                self._answers.pop(ticket).set_exception(Refused(refusal))
            case EngineReady(ready):
                # Set here, not in `wait_ready`: newer gauges may have arrived by then.
                self._gauges = ready.gauges
                self._ready.set_result(ready)
            case EngineFailed(reason, by_setup):
                if by_setup and not self._ready.done():
                    self._ready.set_exception(SetupError(reason))
                # While it starts only its user reads the reason; later probes do.
                self._die(NotServing("it failed", reason) if self._ready.done() else NotServing(reason))


def _own_part(message: FromEngine, sharer: EngineSharer) -> FromEngine | None:
    """The part of a message that belongs to the submitters here, after the sharer has taken its part."""
    match message:
        case StepOutput():
            theirs, own = sharer.split(message)
            if theirs is not None:
                sharer.take(theirs)
            return own
        case Accepted(ticket) | RefusedMessage(ticket) if sharer.owns_ticket(ticket):
            sharer.take(message)
            return None
        case Pulse():
            sharer.record_pulse(message)
            return None
        case _:
            return message


def _burst_of(news: RequestProgress) -> TokenBurst:
    tokens = tuple(news.tokens)
    ended = None if news.ended is None else ended_of(news.ended)
    prompt = () if news.prompt_logprobs is None else (news.prompt_logprobs,)
    return TokenBurst(tokens, logprobs_of(tokens, news.logprobs), ended, news.cached_tokens, prompt)
