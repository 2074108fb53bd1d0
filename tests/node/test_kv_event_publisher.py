"""KV events over real sockets: who comes late or is too slow recovers what was missed. Options that cannot work."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from baton.core.config import BadConfig
from baton.core.engine.block_contents import BlockContent, BlockEvents
from baton.core.errors import EXIT_SETUP
from baton.node import kv_event_publisher
from baton.node.kv_event_publisher import EndpointInUse, KvEventPublisher
from baton.node.network_trust import UntrustedNetwork
from baton.node.service import ServeSettings
from baton.node.settings import EngineSettings, KvEventSettings, KvEventsFormat
from tests.support.kv_reader import DEADLINE_S, Subscriber
from tests.support.server import refused_by_serve
from tests.support.waiting import wait_until

SIZE = 2
FREE = "tcp://127.0.0.1:0"


def stored(number: int, blocks: int = 1) -> BlockEvents:
    """A sequence of so many blocks."""
    keys = [(number * blocks + at).to_bytes(16, "big") for at in range(blocks)]
    parents = [None, *keys[:-1]]
    held = b"\xff\xff\xff\x7f" * SIZE
    contents = tuple(BlockContent(key, parent, held, b"") for key, parent in zip(keys, parents, strict=True))
    return BlockEvents(number == 0, contents, ())


@pytest.fixture
def closing() -> Iterator[list[Any]]:
    opened: list[Any] = []
    yield opened
    for one in opened:
        one.close()


def publisher(closing: list[Any], **fields: Any) -> KvEventPublisher:
    made = KvEventPublisher(
        KvEventSettings(**{"kv_events_endpoint": FREE, "kv_events_replay_endpoint": FREE} | fields), SIZE
    )
    closing.append(made)
    return made


def subscriber(closing: list[Any], of: KvEventPublisher, **fields: Any) -> Subscriber:
    made = Subscriber(of.endpoint, of.replay_endpoint, **fields)
    closing.append(made)
    return made


def publish(to: KvEventPublisher, events: BlockEvents) -> None:
    wait_until(lambda: to.has_room)
    to.publish(events)


def publish_until_heard(to: KvEventPublisher, hearing: Subscriber, number: int) -> int:
    """A subscription takes a while to arrive: the number of batches published by then."""
    for at in range(number, number + 10_000):
        publish(to, stored(at))
        if hearing.hears_within(0.02):
            return at + 1
    raise AssertionError("nothing was heard")


@pytest.mark.parametrize("written", list(KvEventsFormat))
def test_who_subscribes_late_has_the_rest_replayed(closing: list[Any], written: KvEventsFormat) -> None:
    published = publisher(closing, kv_events_format=written, kv_events_topic="kv@a@m")
    for number in range(5):
        publish(published, stored(number))
    late = subscriber(closing, published, topic="kv@a@m", by_name=written is KvEventsFormat.MAP)
    count = publish_until_heard(published, late, 5)
    while late.next_number < count:
        late.hear()
    assert late.gaps >= 1
    assert late.reader.blocks.keys() == set(range(count))
    assert late.reader.seen["cleared"] == 1
    traffic = published.traffic()
    assert (traffic.batches, traffic.stored_blocks, traffic.cleared) == (count, count, 1)
    assert traffic.replays >= 1


def test_a_slow_subscriber_sees_gaps_and_recovers(closing: list[Any]) -> None:
    """It is told of more than all buffers between hold while it does not read."""
    batches, blocks = 100, 4096
    published = publisher(closing, kv_events_hwm=1)
    slow = subscriber(closing, published, buffers_little=True)
    count = publish_until_heard(published, slow, 0)
    while slow.next_number < count:
        slow.hear()
    gaps = slow.gaps
    for number in range(count, count + batches):
        publish(published, stored(number, blocks))
    wait_until(lambda: published.traffic().batches == count + batches)
    publish_until_heard(published, slow, 10**9)
    while slow.next_number < count + batches:
        slow.hear()
    assert slow.gaps > gaps
    assert len(slow.reader.blocks) >= batches * blocks


def test_who_asks_for_what_is_no_longer_kept_is_noted_but_not_often(closing: list[Any]) -> None:
    published = publisher(closing, kv_events_buffer_steps=3)
    late = subscriber(closing, published)
    for number in range(3):
        publish(published, stored(number))
    wait_until(lambda: published.traffic().batches == 3)
    late.catch_up()
    assert not published.asked_for_all(), "everything was there"
    publish(published, stored(3))
    wait_until(lambda: published.traffic().batches == 4)
    for asked in (True, False):
        late.next_number = 0
        late.reader.blocks.clear()
        late.catch_up()
        assert published.asked_for_all() is asked


def test_only_the_last_batches_are_kept(closing: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    published = publisher(closing, kv_events_buffer_steps=3)
    for number in range(10):
        publish(published, stored(number))
    wait_until(lambda: published.traffic().batches == 10)
    late = subscriber(closing, published)
    late.catch_up()
    assert late.reader.blocks.keys() == {7, 8, 9}
    assert late.next_number == 10
    monkeypatch.setattr(kv_event_publisher, "KEPT_BYTES_MAX", 1)
    publish(published, stored(10))
    wait_until(lambda: published.traffic().batches == 11)
    late.next_number = 0
    late.catch_up()
    assert late.next_number == 0, "one batch is more than what may be kept"


@pytest.mark.parametrize(
    "frames", [[b""], [b"x", bytes(8)], [b"", b"7"], [b"", bytes(8), b"more"], [bytes(8)]], ids=lambda frames: f"{frames}"
)
def test_a_request_that_is_none_gets_no_answer_and_the_next_one_does(closing: list[Any], frames: list[bytes]) -> None:
    published = publisher(closing)
    publish(published, stored(0))
    wait_until(lambda: published.traffic().batches == 1)
    with zmq.Context() as context, context.socket(zmq.DEALER) as asking:
        asking.setsockopt(zmq.RCVTIMEO, DEADLINE_S * 1000)
        asking.setsockopt(zmq.LINGER, 0)
        asking.connect(published.replay_endpoint)
        asking.send_multipart(frames)
        asking.send_multipart((b"", bytes(8)))
        assert asking.recv_multipart()[1] == bytes(8)
        assert asking.recv_multipart() == [b"", b"\xff" * 8, b""]
        assert not asking.poll(0)
    assert published.traffic().replays == 1


def test_a_reader_that_listens_is_connected_to(closing: list[Any], tmp_path: Path) -> None:
    with zmq.Context() as context, context.socket(zmq.SUB) as listening:
        listening.setsockopt(zmq.RCVTIMEO, DEADLINE_S * 1000)
        listening.subscribe("t")
        listening.bind(endpoint := f"ipc://{tmp_path}/reader")
        published = publisher(
            closing, kv_events_endpoint=endpoint, kv_events_connect=True, kv_events_replay_endpoint=None, kv_events_topic="t"
        )
        assert published.replay_endpoint == ""
        for number in range(10_000):
            publish(published, stored(number))
            if listening.poll(20):
                break
        assert listening.recv_multipart()[0] == b"t"


def test_what_was_handed_in_before_the_end_is_sent(closing: list[Any]) -> None:
    published = publisher(closing)
    hearing = subscriber(closing, published)
    count = publish_until_heard(published, hearing, 0)
    while hearing.next_number < count:
        hearing.hear()
    published.publish(stored(count))
    published.close()
    hearing.hear()
    assert count in hearing.reader.blocks


def test_a_port_in_use_is_told_with_the_option(closing: list[Any]) -> None:
    taken = publisher(closing)
    with pytest.raises(EndpointInUse, match=rf"--kv-events-endpoint {taken.endpoint}: Address already in use"):
        KvEventPublisher(KvEventSettings(kv_events_endpoint=taken.endpoint), SIZE)
    with pytest.raises(EndpointInUse, match="--kv-events-replay-endpoint"):
        KvEventPublisher(KvEventSettings(kv_events_endpoint=FREE, kv_events_replay_endpoint=taken.endpoint), SIZE)


# ── options ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def made(**fields: Any) -> ServeSettings:
    given = {
        name: value for name, value in fields.items() if name in {one.name for one in dataclasses.fields(EngineSettings)}
    }
    assert given == fields
    return ServeSettings(engine=EngineSettings(endpoint="", model_folder=None, prefix_secret=b"", **fields))


@pytest.mark.parametrize("endpoint", ["tcp://*:5557", "tcp://0.0.0.0:5557", "tcp://10.0.0.9:5557", "tcp://[::]:5557"])
@pytest.mark.parametrize("is_replay", [False, True])
def test_endpoints_beyond_loopback_need_a_trusted_network(endpoint: str, is_replay: bool) -> None:
    fields = (
        {"kv_events_endpoint": FREE, "kv_events_replay_endpoint": endpoint}
        if is_replay
        else {"kv_events_endpoint": endpoint}
    )
    with pytest.raises(UntrustedNetwork, match=r"token ids of all prompts.*--trust-network"):
        made(**fields)
    made(**fields, trust_network=True)


@pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1:5557", "tcp://localhost:5557", "tcp://[::1]:5557", "ipc:///run/kv"])
def test_endpoints_on_this_machine_need_nothing(endpoint: str) -> None:
    made(kv_events_endpoint=endpoint, kv_events_replay_endpoint=endpoint)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"kv_events_endpoint": "127.0.0.1:5557"}, "is not tcp://ADDRESS:PORT"),
        ({"kv_events_endpoint": "tcp://127.0.0.1"}, "is not tcp://ADDRESS:PORT"),
        ({"kv_events_endpoint": "tcp://127.0.0.1:70000"}, "is not tcp://ADDRESS:PORT"),
        ({"kv_events_endpoint": "inproc://x"}, "is not tcp://ADDRESS:PORT"),
        ({"kv_events_endpoint": FREE, "kv_events_replay_endpoint": "x"}, "--kv-events-replay-endpoint x is not"),
        ({"kv_events_endpoint": FREE, "kv_events_connect": True}, "no address to connect to"),
        ({"kv_events_replay_endpoint": FREE}, "only for --kv-events-endpoint"),
        ({"kv_events_connect": True}, "only for --kv-events-endpoint"),
        ({"kv_events_endpoint": FREE, "prefix_cache": False}, "leave --no-prefix-cache out"),
    ],
)
def test_options_that_cannot_work_are_refused(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(BadConfig, match=reason):
        made(**fields)


def test_serve_refuses_an_open_endpoint_before_anything_starts() -> None:
    code, output = refused_by_serve("--executor", "scripted", "--kv-events-endpoint", "tcp://*:5557")
    assert code == EXIT_SETUP
    assert "--trust-network" in output


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_publisher_that_fails_says_that_events_have_ended(
    closing: list[Any], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> bytes:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(kv_event_publisher, "batch_of", broken)
    failing = publisher(closing)
    failing.publish(stored(0))
    wait_until(lambda: "ZeroDivisionError: a bug" in caplog.text)
    assert "no KV events are published any more" in caplog.text
