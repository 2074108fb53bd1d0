"""Borders between processes: messages of engine, router, instances and peers, their sessions, seals, and recordings."""

from __future__ import annotations

import contextlib
import random
import struct
import zlib

import msgspec

from tests.fuzz.border import Border, MakeBorder
from tests.fuzz.inputs import Draw, from_bytes, from_msgpack

KEY = b"the key of the cluster"
VOCABULARY = 64


def engine_samples() -> list[bytes]:
    """One of each message between an engine and its front end, at least."""
    from baton.core.engine.gauges import DraftGauges, StoreTraffic
    from baton.core.engine.orders import Accepted, Cancel, Drain, ReportChanges, StopAt, Submit
    from baton.core.engine.progress_watch import EngineBeat
    from baton.core.errors import RefusalCode
    from baton.wire import engine_messages as messages
    from tests.wire.test_engine_messages import _settled
    from tests.wire.test_router_messages import GAUGES, _group

    to_engine = (
        Submit(7, tuple(_group())), Cancel(8), StopAt(8, 3), Drain(), ReportChanges(),
        messages.PrefillPeerAddresses(("p0:4711",)),
    )  # fmt: skip
    from_engine = (
        messages.step_output(_settled(), GAUGES, DraftGauges()),
        messages.Pulse(GAUGES, True, True, b"k" * 32, b"l" * 16, ((8, "running", 5),), ((8, 1),)),
        messages.ReadyMessage(messages.WIRE_VERSION, 512, VOCABULARY, 4, 64, 16, "cpu", GAUGES, b"f" * 16, "h:1", 5),
        messages.StartStage("loading the weights"),
        messages.FailedMessage("no more memory"),
        Accepted(7, (8, 9)),
        messages.RefusedMessage(7, RefusalCode.QUEUE_FULL, "the queue is full", 1),
        messages.DrainBegun(GAUGES),
        messages.PeerTraffic({"seal": 2}, 4096),
        StoreTraffic(1, 2, 3, 4, 5, 6, {"torn": 1}),
        messages.KvEventTraffic(1, 2, 3, 4, 5),
        messages.StepSizes(tokens=5),
    )
    return [
        *map(messages.encode_to_engine, to_engine),
        *map(messages.encode_from_engine, from_engine),
        messages.encode_beat(EngineBeat(launched=5, settled=3, turns=100, waits=True)),
    ]


def _engine() -> Border:
    from baton.wire import engine_messages as messages

    def decode(data: bytes) -> object:
        """Whatever one of the decoders understands."""
        understood: list[object] = []
        refusal: messages.WireError | None = None
        for one in (messages.decode_to_engine, messages.decode_beat, messages.decode_from_starting_engine):
            try:
                message = one(data)
                understood.append(messages.DecodedRows(message) if isinstance(message, messages.StepOutput) else message)
            except messages.WireError as error:
                refusal = error
        if refusal is not None and not understood:
            raise refusal
        return understood

    return Border(decode, (messages.WireError,), from_msgpack(engine_samples()))


def _membership() -> Border:
    from baton.wire.engine_messages import WireError
    from baton.wire.membership_decoding import heartbeat_of, held_of
    from baton.wire.router_messages import (
        HeartbeatMessage,
        HeldGroup,
        PlaceAttempt,
        check_group,
        decode_from_instance,
        decode_from_router,
        encode_membership,
        held_bytes,
    )
    from tests.wire.test_router_messages import FROM_INSTANCE, FROM_ROUTER, JOIN

    def decode(data: bytes) -> object:
        try:
            order = decode_from_router(data)
            if isinstance(order, PlaceAttempt):
                check_group(order.group, VOCABULARY)
        except WireError:
            pass
        message = decode_from_instance(data)
        match message:
            case HeldGroup():
                return held_bytes(message), held_of(message, JOIN)
            case HeartbeatMessage():
                return heartbeat_of(message, {})
            case _:
                return message

    samples = [encode_membership(message) for message in (*FROM_INSTANCE, *FROM_ROUTER)]
    return Border(decode, (WireError,), from_msgpack(samples))


def _router_session() -> Border:
    """A router's session with an instance that may say anything: through the decoder, the session and the router itself."""
    from baton.core.engine.orders import Accepted
    from baton.core.routing.config import RouterConfig
    from baton.core.routing.events import Session
    from baton.core.routing.router import Router
    from baton.wire.engine_messages import WireError
    from baton.wire.router_messages import AllHeldSaid, decode_from_instance, encode_membership
    from baton.wire.router_sessions import CloseConnection, RouterSessions
    from tests.wire.test_router_messages import FROM_INSTANCE, JOIN, _group

    class World:
        """A router whose instance has joined, accepted two choices and may be heard for a few messages."""

        def __init__(self) -> None:
            self.sessions = RouterSessions(Router(RouterConfig(), b"secret", seed=1), "router")
            self.session: Session = self.sessions.connected(0)
            for message in (JOIN, AllHeldSaid()):
                self.sessions.receive(self.session, message, 0)
            self.sessions.submit("tenant", _group(), b"origin", 0)
            self.sessions.receive(self.session, Accepted(0, (8, 9)), 0)
            self.heard = 0

    world = World()

    def decode(data: bytes) -> object:
        nonlocal world
        if world.heard > 20:
            world = World()
        world.heard += 1
        try:
            acts = world.sessions.receive(world.session, decode_from_instance(data), world.heard * 1000)
            if any(isinstance(act, CloseConnection) for act in acts):
                world = World()
            return acts
        except WireError:
            if world.heard % 4 == 0:  # as its driver does each time; making a world takes longer than all else here
                world.sessions.lost(world.session, "it broke the protocol", world.heard * 1000)
                world = World()
            raise

    return Border(decode, (WireError,), from_msgpack([encode_membership(message) for message in FROM_INSTANCE]))


def _instance_session() -> Border:
    """An instance's session with a router that may say anything."""
    from baton.core.engine.orders import Accepted
    from baton.wire.engine_messages import WireError
    from baton.wire.instance_sessions import InstanceSessions
    from baton.wire.router_messages import PlaceAttempt, Welcome, decode_from_router, encode_membership
    from tests.wire.test_router_messages import FROM_ROUTER, JOIN, _group, _step

    class World:
        def __init__(self) -> None:
            self.sessions = InstanceSessions(JOIN)
            self.sessions.opened(0)
            self.sessions.receive(Welcome("router", 200_000, 10_000_000), 0)
            placed = self.sessions.receive(PlaceAttempt(3, tuple(_group()), (2, 0), 3, b"origin"), 0)
            (order,) = placed.orders
            self.sessions.take(Accepted(order.ticket, (8, 9)), 0)  # type: ignore[union-attr]
            self.sessions.take(_step(), 0)
            self.heard = 0

    world = World()

    def decode(data: bytes) -> object:
        nonlocal world
        if world.heard > 20:
            world = World()
        world.heard += 1
        effects = world.sessions.receive(decode_from_router(data), world.heard * 1000)
        if effects.turned_away is not None or effects.hang_up is not None:
            world = World()
        return effects

    return Border(decode, (WireError,), from_msgpack([encode_membership(message) for message in FROM_ROUTER]))


def _peers() -> Border:
    from baton.wire.engine_messages import WireError
    from baton.wire.peer_messages import Register, Registered, encode_registration
    from baton.wire.peer_session import PeerSession, unfit_reason
    from tests.wire.test_decoder_fuzz import _frames

    ours = Register("p0", 5, "prefill", b"f" * 16, "float32", 16, (4096,) * 4, ("tcp:127.0.0.1:4711",))
    register, registered = (encode_registration(one) for one in (ours, Registered()))

    def opened(gives: bool) -> PeerSession:
        session = PeerSession(gives=gives, vocabulary=VOCABULARY, now_us=0)
        session.opened(ours)
        return session

    def heard(session: PeerSession, data: bytes) -> object:
        return session.receive(data, lambda theirs: unfit_reason(ours, theirs))

    gives, takes = opened(True), opened(False)
    for session in (gives, takes):
        for frame in (register, registered):
            session.receive(frame, lambda _: None)

    def decode(data: bytes) -> object:
        for session in (opened(True), gives):
            with contextlib.suppress(WireError):
                heard(session, data)
        return heard(takes, data)

    return Border(decode, (WireError,), from_msgpack(_frames()))


def _seal() -> Border:
    """Streams with a seal: strangers in the handshake, and anything that the way may do to frames."""
    from baton.wire.seal import SealBroken
    from tests.wire.test_decoder_fuzz import FRAMES, LIMIT, Recording, _stream

    recordings = [Recording(True), Recording(False)]

    def draw_input(draw: random.Random) -> bytes:
        which = draw.randrange(2)
        before, after = _stream(recordings[which], recordings[1 - which], draw)
        return bytes([which, draw.randrange(256)]) + before + after

    def decode(data: bytes) -> object:
        recording, stream = recordings[data[0] % 2], data[2:]
        seal, got, cut = recording.fresh(), list[bytes](), len(stream) * data[1] // 256
        try:
            for part in (stream[:cut], stream[cut:]):
                seal.take_into(part, got)
        finally:
            if got != FRAMES[: len(got)] or len(seal._buffer) > len(recording.shaken) + LIMIT + 64:
                raise AssertionError("a frame that nobody sent, or more kept than can become one")
        return got

    return Border(decode, (SealBroken,), draw_input)


def _sealed_stream() -> Border:
    """A connection with its stages and time: it has an end for everything, and never raises."""
    from baton.wire.seal import NONCE_BYTES, SealSide
    from baton.wire.sealed_stream import SealedStream, StreamConfig
    from tests.wire.test_decoder_fuzz import LIMIT, Recording

    recordings = {SealSide.CONNECTOR: Recording(True), SealSide.ACCEPTOR: Recording(False)}
    config = StreamConfig(heartbeat_us=1000, silent_us=5000, frame_bytes_max=LIMIT)
    samples = [bytes([side.value]) + made.shaken + b"".join(made.sealed) for side, made in recordings.items()]

    def decode(data: bytes) -> object:
        side = SealSide.CONNECTOR if data[:1] == b"\1" else SealSide.ACCEPTOR
        nonce = (b"c" if side is SealSide.CONNECTOR else b"a") * NONCE_BYTES
        name = "d" if side is SealSide.CONNECTOR else "p"
        stream = SealedStream(side, KEY, name, nonce, config)
        stream.begin(0)
        half = len(data) // 2
        heard = [stream.receive(data[1:half], 10), stream.receive(data[half:], 20)]
        stream.tick(2000)
        stream.send([b"answer"], 2001)
        return heard, stream.output(), stream.end_of_stream(), stream.next_deadline()

    return Border(decode, (), from_bytes(samples))


def _snapshot() -> Border:
    from collections import Counter, OrderedDict, deque

    import numpy as np

    from baton.core.content_hashes import RecordedHashes
    from baton.core.engine.plan import Chunk
    from baton.core.engine.request import NO_TOKENS, Phase
    from baton.wire.snapshot import BadSnapshot, decode_value, encode_value, restore, snapshot
    from tests.recording.test_snapshot import request

    leader, follower = request(0), request(1)
    leader.followers.append(follower)
    follower.leader = leader
    plain = [1, 2.5, "x", b"y", None, True, 1 << 80, (1, 2), Phase.WAITING, Chunk(1, 2, 3, 4, True), NO_TOKENS]
    kept = [OrderedDict(a=1), Counter(a=2), deque([1], maxlen=3), {1, 2}, frozenset([3]), bytearray(b"z"), {"k": [leader]}]
    arrays = [np.arange(6, dtype=np.int8).reshape(2, 3), np.int64(7), np.zeros((0, 3), np.float32)]
    samples = [snapshot((leader, follower)), snapshot(plain), snapshot(kept), snapshot(arrays)]
    samples += [encode_value([plain, kept[:-1]]), encode_value(request(2))]
    hashes = RecordedHashes()

    def decode(data: bytes) -> object:
        with contextlib.suppress(BadSnapshot):
            decode_value(data)
        return restore(data, hashes)

    return Border(decode, (BadSnapshot,), from_msgpack(samples))


def _recording() -> Border:
    from baton.wire.recording_file import MAGIC, BadRecording, Recording, RecordingHeader
    from baton.wire.snapshot import snapshot

    header = RecordingHeader("1", "engine", "a", "a test", "now", True)
    bodies: list[tuple[int, object]] = [
        (1, header),
        (2, snapshot([1, 2])),
        (3, ([b"h" * 16], [("handle", b"arguments", b"result", 1)])),
        (4, 12),
    ]
    encoded = [(kind, msgspec.msgpack.encode(body)) for kind, body in bodies]
    draws = [from_msgpack([data]) for _, data in encoded]
    whole = MAGIC + b"".join(_recording_frame(kind, data) for kind, data in encoded)
    by_bytes = from_bytes([whole])

    def decode(data: bytes) -> object:
        return list(Recording(data).frames())

    return Border(decode, (BadRecording,), _recording_inputs(MAGIC, encoded, draws, by_bytes))


def _recording_inputs(magic: bytes, encoded: list[tuple[int, bytes]], draws: list[Draw], by_bytes: Draw) -> Draw:
    def draw_input(draw: random.Random) -> bytes:
        if draw.random() < 0.3:
            return by_bytes(draw)
        harmed = draw.randrange(len(encoded))  # one frame has another body, under a true checksum
        frames = [_recording_frame(k, draws[at](draw) if at == harmed else data) for at, (k, data) in enumerate(encoded)]
        if draw.random() < 0.02:
            frames[harmed] = _bomb(draw)
        return magic + b"".join(frames)

    return draw_input


def _recording_frame(kind: int, body: bytes) -> bytes:
    data = zlib.compress(body, 1)
    return struct.pack("<BII", kind, len(data), zlib.crc32(data)) + data


def _bomb(draw: random.Random) -> bytes:
    """A frame that is small until it is unpacked."""
    return _recording_frame(draw.randrange(1, 5), bytes(draw.choice((10_000, 1_000_000))))


BORDERS: dict[str, MakeBorder] = {
    "wire-engine": _engine,
    "wire-membership": _membership,
    "wire-router-session": _router_session,
    "wire-instance-session": _instance_session,
    "wire-peers": _peers,
    "wire-seal": _seal,
    "wire-sealed-stream": _sealed_stream,
    "wire-snapshot": _snapshot,
    "wire-recording": _recording,
}
