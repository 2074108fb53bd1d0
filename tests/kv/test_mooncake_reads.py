"""Reading through mooncake's engine, when the other side has stopped."""

from __future__ import annotations

import socket
import struct
import subprocess
import sys

import pytest

from baton.core.handover.messages import Fenced, TransferBroken
from baton.kv.transfer_contract import available
from baton.kv.transfer_frames import encode_hello, encode_pieces
from tests.support.transfers import LAYOUT, ROOT, TOKEN, Pair, giver_names, ids, pair_of, taker_names

pytestmark = pytest.mark.skipif(available("mooncake") is not None, reason=str(available("mooncake")))


def _announce(pair: Pair, request: int, engine: str, address: int = 4096) -> socket.socket:
    """A line whose introduction names an engine of our choice, and a piece to read from it."""
    pair.receiver.expect(taker_names(request), TOKEN, 0, ids(7))
    line = socket.create_connection(("127.0.0.1", int(pair.receiver.address.rpartition(":")[2])))
    hello = encode_hello("mooncake", giver_names(request), LAYOUT.digest, TOKEN)
    line.sendall(hello + struct.pack("<QQ64s", address, 10, engine.encode()) + ids(1).tobytes())
    if line.recv(1):
        line.sendall(encode_pieces(range(1), 0, 1))
    return line


def _deaf_engine() -> None:
    """In a process of its own, which ends without waiting for what hangs in it."""
    with pair_of("mooncake", {"stall_s": 0.2}) as pair, socket.create_server(("127.0.0.1", 0)) as deaf:
        name = f"127.0.0.1:{deaf.getsockname()[1]}"
        lines = [_announce(pair, request, name) for request in range(1, 7)]
        pair.receiver.fence(taker_names(1))
        pair.got.next(Fenced, taker_names(1))
        for _ in lines[1:]:
            assert "half of a piece" in pair.got.next(TransferBroken).reason
        sys.stdout.write("all answered\n")
        sys.stdout.flush()
        sys.stdin.readline()


def test_with_engines_that_never_answer_fences_and_ends_come_all_the_same() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.kv.test_mooncake_reads"],
        cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "all answered\n"
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("engine", ["127.0.0.1:1", "", "nowhere"])
def test_an_engine_that_is_not_there_spoils_it(engine: str) -> None:
    with pair_of("mooncake") as pair:
        line = _announce(pair, 1, engine)
        assert "cannot read" in pair.got.next(TransferBroken).reason
        line.close()


def test_memory_that_was_never_registered_spoils_it() -> None:
    with pair_of("mooncake") as pair:
        transport = _announce(pair, 1, "127.0.0.1:1", address=2**63)
        assert "no address" in pair.got.next(TransferBroken).reason
        transport.close()


if __name__ == "__main__":
    _deaf_engine()
