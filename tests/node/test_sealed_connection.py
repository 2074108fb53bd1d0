"""Sealed connections over real sockets: frames arrive whole and in order; connections that break the rules are counted."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest

from baton.node.sealed_connection import ConnectionEvents, Listener, SealedConnection, connect
from baton.wire.engine_messages import FRAME_BYTES_MAX, WireError
from baton.wire.seal import NONCE_BYTES, Seal, SealFault
from baton.wire.sealed_stream import AcceptedStreams, ConnectionEnd, ConnectionFault, ConnectionStage, StreamConfig

KEY, OTHER_KEY = b"k" * 32, b"o" * 32
DEADLINE_S = 20.0


class Room:
    """One side: records its events."""

    def __init__(self) -> None:
        self.lines: list[SealedConnection] = []
        self.frames: list[bytes] = []
        self.ends: list[ConnectionEnd] = []
        self._news = asyncio.Event()

    def connected(self, line: SealedConnection) -> None:
        pass

    def opened(self, line: SealedConnection) -> None:
        self.lines.append(line)
        self._news.set()

    def received(self, line: SealedConnection, frame: bytes) -> None:
        if frame == b"nonsense":
            raise WireError("that is no message")
        self.frames.append(frame)
        self._news.set()

    def ended(self, line: SealedConnection, end: ConnectionEnd) -> None:
        self.ends.append(end)
        self._news.set()

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not holds():
                self._news.clear()
                await self._news.wait()


class ListenerServer:
    """A Listener on a free port."""

    def __init__(self, config: StreamConfig) -> None:
        self.room = Room()
        self.listening = Listener(KEY, "inn", self.room, config)
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self.listener.getsockname()[1]

    async def refuses(self, fault: str) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not self.listening.refused[fault]:  # noqa: ASYNC110  the door tells nobody of strangers
                await asyncio.sleep(0)

    async def still_serves(self) -> None:
        """A valid connection works now, whatever happened before."""
        guest, calling = await dial(self)
        guest.lines[0].send([b"good"])
        await self.room.until(lambda: b"good" in self.room.frames)
        guest.lines[0].abort(None, "done")
        await calling


@contextlib.asynccontextmanager
async def listening_server(**config: int) -> AsyncIterator[ListenerServer]:
    made = ListenerServer(StreamConfig(**config))
    await made.listening.open(made.listener)
    try:
        yield made
    finally:
        made.listening.close("the test is over")


async def dial(to: ListenerServer, key: bytes = KEY, name: str = "guest") -> tuple[Room, asyncio.Task[ConnectionEnd]]:
    room = Room()
    line = SealedConnection(key, name, room, connects_to="the inn")
    calling = asyncio.create_task(connect(line, "127.0.0.1", to.port, DEADLINE_S))
    await room.until(lambda: bool(room.lines or room.ends))
    return room, calling


class Cheat:
    """A connecting side that holds the key and alters the bytes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: bytes, name: str) -> None:
        self.reader, self.writer = reader, writer
        self.seal = Seal.connect(key, name, bytes(NONCE_BYTES), frame_bytes_max=1 << 30)

    @classmethod
    async def come(cls, to: ListenerServer, key: bytes = KEY, name: str = "cheat") -> Cheat:
        cheat = cls(*await asyncio.open_connection("127.0.0.1", to.port), key, name)
        cheat.writer.write(cheat.seal.outgoing())
        return cheat

    async def shake_hands(self) -> Cheat:
        while not self.seal.is_open:
            self.seal.take(await self.reader.read(4096))
            self.writer.write(self.seal.outgoing())
        return self

    def write(self, data: bytes) -> None:
        self.writer.write(data)

    async def hung_up(self) -> None:
        async with asyncio.timeout(DEADLINE_S):
            with contextlib.suppress(ConnectionResetError):
                while await self.reader.read(4096):
                    pass
        self.writer.close()


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(test)


def test_each_hears_what_the_other_sends_whole_and_in_order() -> None:
    async def test() -> None:
        async with listening_server() as host:
            guest, calling = await dial(host)
            await host.room.until(lambda: bool(host.room.lines))
            assert (guest.lines[0].peer, host.room.lines[0].peer) == ("inn", "guest")
            sent = [bytes([n]) * (n * 400) for n in range(1, 251)]
            guest.lines[0].send(sent[:200])
            guest.lines[0].send(sent[200:])
            host.room.lines[0].send(sent)
            await host.room.until(lambda: len(host.room.frames) == len(sent))
            await guest.until(lambda: len(guest.frames) == len(sent))
            assert host.room.frames == guest.frames == sent
            guest.lines[0].abort(None, "it goes")
            assert (await calling).reason == "it goes"
            await host.room.until(lambda: bool(host.room.ends))
            assert host.room.ends[0].was is ConnectionStage.OPEN
            assert (host.room.ends[0].fault, host.listening.refused.total()) == (None, 0)

    run(test())


def test_a_frame_never_waits_for_the_one_before() -> None:
    async def test() -> None:
        async with listening_server() as host:
            guest, _ = await dial(host)
            await host.room.until(lambda: bool(host.room.lines))
            for line in (guest.lines[0], host.room.lines[0]):
                connection = line._transport.get_extra_info("socket")  # type: ignore[union-attr]
                assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            guest.lines[0].abort(None, "done")

    run(test())


def test_last_words_are_heard_though_the_other_side_went_on_talking() -> None:
    async def test() -> None:
        async with listening_server() as host:
            guest, calling = await dial(host)
            await host.room.until(lambda: bool(host.room.lines))
            # More than the kernels hold: the parting waits for it to be read, and what comes meanwhile is ignored.
            words = [bytes(1 << 20)] * 16
            guest.lines[0].send(words)
            host.room.lines[0].send([*words, b"farewell"])
            host.room.lines[0].close("turned away")
            assert host.room.ends == [ConnectionEnd(ConnectionStage.OPEN, None, "turned away")]
            await calling
            assert guest.frames == [*words, b"farewell"]
            assert not host.room.frames

    run(test())


def test_another_key_is_refused_on_both_sides_counted_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        async with listening_server() as host:
            for _ in range(3):
                guest, calling = await dial(host, OTHER_KEY)
                end = await calling
                assert end.was is ConnectionStage.UNPROVED
                assert "cluster key" in end.reason
                assert not guest.lines
            await host.refuses(SealFault.WRONG_KEY)
            assert host.listening.refused == {SealFault.WRONG_KEY: 3}
            assert not host.room.lines
            await host.still_serves()

    with caplog.at_level(logging.ERROR, "baton.line"):
        run(test())
    assert len(caplog.records) == 1


def test_whoever_answers_without_the_key_is_left() -> None:
    async def test() -> None:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            seal = Seal.accept(KEY, "impostor", bytes(NONCE_BYTES))
            seal.take(await reader.readexactly(39 + len("guest")))
            writer.write(seal.outgoing() + bytes(32))  # a hello, and a proof that is none
            writer.close()

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        room = Room()
        line = SealedConnection(KEY, "guest", room, connects_to="an impostor")
        end = await connect(line, "127.0.0.1", server.sockets[0].getsockname()[1], DEADLINE_S)
        server.close()
        assert (end.was, end.fault, room.lines) == (ConnectionStage.UNPROVED, SealFault.WRONG_KEY, [])

    run(test())


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def a_forged_head(seal: Seal) -> bytes:
    return flipped(seal.seal(b"hello"), 9)


def a_forged_body(seal: Seal) -> bytes:
    return flipped(seal.seal(b"hello"), 28)


def a_replayed_frame(seal: Seal) -> bytes:
    return seal.seal(b"hello") * 2


def a_missing_frame(seal: Seal) -> bytes:
    seal.seal(b"hello")
    return seal.seal(b"hello again")


def an_oversized_frame(seal: Seal) -> bytes:
    return seal.seal(bytes(FRAME_BYTES_MAX + 1))[:28]  # its head is enough: nobody waits for the rest


def no_message(seal: Seal) -> bytes:
    return seal.seal(b"nonsense")


@pytest.mark.parametrize(
    ("attack", "fault"),
    [
        (a_forged_head, SealFault.FORGED),
        (a_forged_body, SealFault.FORGED),
        (a_replayed_frame, SealFault.OUT_OF_SEQUENCE),
        (a_missing_frame, SealFault.OUT_OF_SEQUENCE),
        (an_oversized_frame, SealFault.OVERSIZED),
        (no_message, ConnectionFault.MALFORMED),
    ],
)
def test_what_is_no_true_frame_in_its_place_ends_the_line_and_is_counted(
    attack: Callable[[Seal], bytes], fault: str
) -> None:
    async def test() -> None:
        async with listening_server() as host:
            cheat = await (await Cheat.come(host)).shake_hands()
            await host.room.until(lambda: bool(host.room.lines))
            cheat.write(attack(cheat.seal))
            await cheat.hung_up()
            await host.room.until(lambda: bool(host.room.ends))
            assert (host.room.ends[0].was, host.room.ends[0].fault) == (ConnectionStage.OPEN, fault)
            assert host.listening.refused == {fault: 1}
            assert host.room.frames in ([], [b"hello"])
            await host.still_serves()

    run(test())


def test_a_recorded_connection_says_nothing_in_another() -> None:
    async def test() -> None:
        async with listening_server() as host:
            cheat = await (await Cheat.come(host)).shake_hands()
            said = cheat.seal.seal(b"hello")
            cheat.write(said)
            await host.room.until(lambda: bool(host.room.frames))
            again = await (await Cheat.come(host)).shake_hands()
            again.write(said)
            await again.hung_up()
            await host.refuses(SealFault.FORGED)
            assert host.room.frames == [b"hello"]
            cheat.writer.close()

    run(test())


def test_a_stranger_that_speaks_something_else_is_refused() -> None:
    async def test() -> None:
        async with listening_server() as host:
            reader, writer = await asyncio.open_connection("127.0.0.1", host.port)
            writer.write(b"GET / HTTP/1.1\r\n\r\n")
            assert await reader.read() == b""
            writer.close()
            assert host.listening.refused == {SealFault.MALFORMED: 1}
            await host.still_serves()

    run(test())


def test_who_does_not_prove_itself_in_time_is_hung_up() -> None:
    async def test() -> None:
        async with listening_server(handshake_us=50_000) as host:
            cheat = await Cheat.come(host)
            await cheat.hung_up()
            assert host.listening.refused == {ConnectionFault.TOO_LATE: 1}

    run(test())


def test_strangers_are_bounded_and_do_not_keep_out_who_holds_the_key() -> None:
    async def test() -> None:
        async with listening_server() as host:
            host.listening._accepted = AcceptedStreams(unproved_max=3)
            waiting = [await Cheat.come(host, name=f"idle {n}") for n in range(3)]
            await host.still_serves()
            await waiting[0].hung_up()
            assert host.listening.refused == {ConnectionFault.TOO_MANY: 1}
            for cheat in waiting:
                cheat.writer.close()

    run(test())


def test_lines_are_bounded() -> None:
    async def test() -> None:
        async with listening_server() as host:
            host.listening._accepted = AcceptedStreams(connections_max=1)
            first, _ = await dial(host, name="first")
            _, calling = await dial(host, name="second")
            await calling
            assert host.listening.refused == {ConnectionFault.TOO_MANY: 1}
            assert not first.ends
            first.lines[0].abort(None, "it goes")
            await host.room.until(lambda: bool(host.room.ends))
            await host.still_serves()

    run(test())


def test_who_gives_no_sign_of_life_is_hung_up_and_who_gives_one_is_not() -> None:
    async def test() -> None:
        config = {"heartbeat_us": 20_000, "silent_us": 400_000}
        async with listening_server(**config) as host:
            cheat = await (await Cheat.come(host)).shake_hands()
            room = Room()
            line = SealedConnection(KEY, "guest", room, connects_to="the inn", config=StreamConfig(**config))
            calling = asyncio.create_task(connect(line, "127.0.0.1", host.port, DEADLINE_S))
            await host.room.until(lambda: bool(host.room.ends))
            assert [line.peer for line in host.room.lines] == ["cheat", "guest"]
            assert "silent" in host.room.ends[0].reason
            assert not room.ends
            assert not room.frames
            line.abort(None, "done")
            await calling
            cheat.writer.close()

    run(test())


def test_who_does_not_read_is_hung_up() -> None:
    async def test() -> None:
        async with listening_server(unread_bytes_max=1 << 20, unread_us=1) as host:
            cheat = await (await Cheat.come(host)).shake_hands()
            await host.room.until(lambda: bool(host.room.lines))
            for _ in range(64):
                host.room.lines[0].send([bytes(1 << 20)])
            await host.room.until(lambda: bool(host.room.ends))
            assert host.room.ends[0].fault == ConnectionFault.NOT_READING
            assert host.listening.refused == {ConnectionFault.NOT_READING: 1}
            cheat.writer.close()
            await host.still_serves()

    run(test())


def test_a_frame_that_is_too_big_is_not_sent_and_harms_nobody() -> None:
    async def test() -> None:
        async with listening_server() as host:
            guest, calling = await dial(host)
            with pytest.raises(WireError):
                guest.lines[0].send([b"small", bytes(FRAME_BYTES_MAX + 1)])
            guest.lines[0].send([b"after"])
            await host.room.until(lambda: bool(host.room.frames))
            assert host.room.frames == [b"after"]
            guest.lines[0].abort(None, "done")
            guest.lines[0].send([b"late"])  # nobody is there any more
            await calling

    run(test())


def test_nobody_there_is_an_end_too() -> None:
    async def test() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
        events: ConnectionEvents = Room()
        end = await connect(SealedConnection(KEY, "guest", events, connects_to="nobody"), "127.0.0.1", port, DEADLINE_S)
        assert (end.was, end.fault) == (ConnectionStage.UNPROVED, None)

    run(test())
