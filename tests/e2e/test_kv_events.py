"""KV events of real servers: a reader knows the cached blocks and their tokens, under preemption, eviction and n > 1."""

from __future__ import annotations

import re
from contextlib import closing
from pathlib import Path

from tests.support.kv_reader import DEADLINE_S, Subscriber
from tests.support.server import ServerProcess, baton_serve
from tests.support.storing import TIGHT, Body, bills, mixture, preempted, right
from tests.support.waiting import wait_until

ANYWHERE = ("--kv-events-endpoint", "tcp://127.0.0.1:0", "--kv-events-replay-endpoint", "tcp://127.0.0.1:0")


def endpoints(server: ServerProcess) -> tuple[str, str]:
    found = re.search(r"KV events can be had at (\S+), missed ones at (\S+):", server.output())
    assert found, server.output()
    return found[1], found[2]


def assert_it_knows(subscriber: Subscriber, server: ServerProcess, bodies: list[Body]) -> None:
    """Exactly the cached blocks, with the tokens of these requests."""

    def knows() -> bool:
        subscriber.catch_up()
        return server.metric("baton_kv_blocks", state="evictable") == len(subscriber.reader.blocks) > 0

    wait_until(lambda: server.metric("baton_kv_blocks", state="running") == 0)
    wait_until(knows, "the reader knows as many blocks as are cached")
    whole = [tuple(body["prompt"]) + tuple(tokens) for body in bodies for tokens in right(body)]
    known = subscriber.reader.sequences()
    assert known
    for sequence in known:
        assert any(tokens[: len(sequence)] == sequence for tokens in whole)


def test_a_reader_knows_the_cached_blocks_of_a_server_with_too_few() -> None:
    with baton_serve(*TIGHT, *ANYWHERE) as server:
        assert "reads the token ids of all prompts" in server.output()
        first, second = mixture(), mixture(10)
        assert preempted(bills(server.url, first)) > 0
        with closing(Subscriber(*endpoints(server))) as late:
            assert_it_knows(late, server, first)
            bills(server.url, second)
            assert_it_knows(late, server, first + second)
        seen = late.reader.seen
        assert seen["removed"] > 0
        assert seen["cleared"] == 1
        wait_until(lambda: server.metric("baton_kv_event_stored_blocks_total") == seen["stored"])
        assert server.metric("baton_kv_event_removed_blocks_total") == seen["removed"]
        wait_until(lambda: server.metric("baton_kv_event_replays_total") >= 2)


def test_a_restart_begins_with_a_fresh_start(tmp_path: Path) -> None:
    places = (f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replays")
    options = ("--kv-events-endpoint", places[0], "--kv-events-replay-endpoint", places[1], "--kv-events-format", "map")
    with closing(Subscriber(*places, topic="kv@a@m", by_name=True)) as reader:
        for life, body in enumerate(mixture()[:2], start=1):
            with baton_serve(*TIGHT, *options, "--kv-events-topic", "kv@a@m") as server:
                bills(server.url, [body])
                reader.next_number = 0
                assert_it_knows(reader, server, [body])
                assert reader.reader.seen["cleared"] == life
                if life == 1:
                    assert reader.hears_within(DEADLINE_S), "it hears of blocks as they come, too"


def test_who_comes_too_late_for_a_replay_is_told_everything_anew() -> None:
    with baton_serve(*TIGHT, *ANYWHERE, "--kv-events-buffer-steps", "2") as server:
        bodies = mixture()
        bills(server.url, bodies)
        with closing(Subscriber(*endpoints(server), strict=False)) as late:
            late.catch_up()
            assert late.next_number > 2
            assert late.reader.seen["cleared"] == 0
            wait_until(lambda: late.catch_up() or late.reader.seen["cleared"] == 1)
            assert_it_knows(late, server, bodies)
