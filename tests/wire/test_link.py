"""Two links over a network that does its worst: each frame once and in order, or the session is lost as a whole."""

from __future__ import annotations

import heapq
import random
from collections import Counter
from dataclasses import asdict, replace
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core.config import BadConfig
from baton.core.errors import IllegalTransition
from baton.wire import link as wire_link
from baton.wire.engine_messages import FRAME_BYTES_MAX, WireError
from baton.wire.link import (
    BARE,
    DATA,
    HEADER_BYTES,
    PACKET_BYTES_MAX,
    RESET,
    Acceptor,
    Initiator,
    Link,
    LinkClosed,
    LinkConfig,
    LinkFull,
    LinkState,
    Lost,
    News,
    Opened,
    Packet,
    Replaced,
    Took,
    pack,
    unpack,
)

CONFIG = LinkConfig()
FRONT, INSTANCE = 0, 1


def _pair(config: LinkConfig = CONFIG, session: int = 7, incarnation: int = 100) -> tuple[Initiator, Acceptor]:
    return Initiator(session, config), Acceptor(incarnation, config)


def _opened(config: LinkConfig = CONFIG, session: int = 7, incarnation: int = 100) -> tuple[Initiator, Acceptor]:
    """A pair whose session is open at time 0."""
    front, instance = _pair(config, session, incarnation)
    for hello in front.open(0):
        for answer in instance.take(hello, 0).packets:
            assert front.take(answer, 0).news == [Opened(session)]
    assert front.state is instance.state is LinkState.OPEN
    return front, instance


def _send(link: Link, frame: bytes, now_us: int = 0) -> bytes:
    (packet,) = link.send(frame, now_us)
    return packet


def _read(data: bytes) -> Packet:
    packet = unpack(data)
    assert packet is not None
    return packet


def _kinds(packets: list[bytes]) -> list[int]:
    return [_read(data).kind for data in packets]


# ── frames ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_frames_pass_both_ways_in_the_order_of_sending() -> None:
    front, instance = _opened()
    for sender, receiver in ((front, instance), (instance, front)):
        frames = [b"%d" % i for i in range(10)]
        assert [frame for sent in frames for frame in receiver.take(_send(sender, sent), 1).frames] == frames


def test_a_frame_may_be_sent_before_the_acceptor_has_answered() -> None:
    front, instance = _pair()
    front.open(0)
    took = instance.take(_send(front, b"early"), 5)
    assert took.frames == [b"early"]
    assert took.news == [Opened(7)]
    assert front.take(took.packets[0], 10).news == [Opened(7)]


def test_an_empty_frame_is_a_frame() -> None:
    front, instance = _opened()
    assert instance.take(_send(front, b""), 0).frames == [b""]


def test_a_repeated_packet_is_delivered_once_and_acknowledged_again() -> None:
    front, instance = _opened()
    packet = _send(front, b"a")
    assert instance.take(packet, 0).frames == [b"a"]
    again = instance.take(packet, 1)
    assert again.frames == []
    assert [(_read(data).kind, _read(data).acked) for data in again.packets] == [(BARE, 1)]
    assert instance.counters.duplicates == 1


def test_frames_that_come_early_wait_until_the_gap_closes() -> None:
    front, instance = _opened()
    packets = [_send(front, frame) for frame in (b"a", b"b", b"c", b"d")]
    for at in (2, 1, 3, 2):
        took = instance.take(packets[at], 0)
        assert took.frames == []
        assert _kinds(took.packets) == [BARE]
    assert instance.take(packets[0], 0).frames == [b"a", b"b", b"c", b"d"]
    assert instance.counters.out_of_order == 3
    assert instance.counters.duplicates == 1
    assert instance.counters.delivered == 4


def test_a_frame_beyond_the_window_is_not_kept() -> None:
    front, instance = _opened()
    del front
    assert instance.take(pack(DATA, 7, 100, CONFIG.window + 1, 0, b"far"), 0).frames == []
    for number in range(CONFIG.window, 1, -1):
        instance.take(pack(DATA, 7, 100, number, 0, b"near"), 0)
    assert len(instance.take(pack(DATA, 7, 100, 1, 0, b"near"), 0).frames) == CONFIG.window


def test_a_frame_over_the_limit_is_refused_by_the_sender() -> None:
    front, _ = _opened()
    with pytest.raises(WireError, match="over the limit"):
        front.send(bytes(FRAME_BYTES_MAX + 1), 0)


# ── window and backlog ─────────────────────────────────────────────────────────────────────────────────────────────


def test_at_most_a_window_is_on_the_network_and_acknowledgements_let_the_rest_follow() -> None:
    front, instance = _opened(LinkConfig(window=4, backlog_max=3, ack_every=2))
    frames = [b"%d" % i for i in range(7)]
    first = [data for frame in frames for data in front.send(frame, 0)]
    assert len(first) == 4
    got, road = [], first
    while road:
        took = instance.take(road.pop(0), 1)
        got += took.frames
        for ack in took.packets:
            road += front.take(ack, 2).packets
    assert got[:6] == frames[:6]
    assert front.counters.sent == 7


def test_a_full_backlog_says_so_and_refuses_more_without_harm() -> None:
    front, instance = _opened(LinkConfig(window=2, backlog_max=2, ack_every=1))
    packets = [data for i in range(3) for data in front.send(b"%d" % i, 0)]
    assert not front.is_full
    front.send(b"3", 0)
    assert front.is_full
    with pytest.raises(LinkFull):
        front.send(b"4", 0)
    (ack,) = instance.take(packets[0], 0).packets
    packets += front.take(ack, 0).packets
    assert not front.is_full
    assert front.undelivered == 3
    assert [frame for data in packets[1:] for frame in instance.take(data, 0).frames] == [b"1", b"2"]


# ── acknowledgements ───────────────────────────────────────────────────────────────────────────────────────────────


def test_an_acknowledgement_waits_for_a_frame_to_ride_on_but_not_long() -> None:
    front, instance = _opened()
    instance.take(_send(front, b"a"), 1_000)
    assert instance.next_deadline() == 1_000 + CONFIG.ack_delay_us
    assert instance.tick(2_999).packets == []
    assert [(_read(data).kind, _read(data).acked) for data in instance.tick(3_000).packets] == [(BARE, 1)]
    instance.take(_send(front, b"b"), 4_000)
    assert _read(_send(instance, b"answer", 4_100)).acked == 2
    assert instance.tick(6_500).packets == []


def test_many_frames_are_acknowledged_at_once() -> None:
    front, instance = _opened()
    answers = [instance.take(_send(front, b"x"), 0).packets for _ in range(CONFIG.ack_every)]
    assert answers[:-1] == [[]] * (CONFIG.ack_every - 1)
    assert [_read(data).acked for data in answers[-1]] == [CONFIG.ack_every]
    assert instance.take(_send(front, b"x"), 0).packets == []


def test_later_frames_do_not_put_an_acknowledgement_off() -> None:
    front, instance = _opened()
    instance.take(_send(front, b"a"), 1_000)
    instance.take(_send(front, b"b"), 2_000)
    assert instance.next_deadline() == 1_000 + CONFIG.ack_delay_us


def test_an_initiator_that_missed_the_first_answer_gets_another_soon() -> None:
    front, instance = _pair()
    (hello,) = front.open(0)
    instance.take(hello, 0)
    (again,) = front.tick(CONFIG.resend_us).packets
    assert instance.take(again, 50_000).packets == []
    (answer,) = instance.tick(50_000 + CONFIG.ack_delay_us).packets
    assert front.take(answer, 60_000).news == [Opened(7)]


def test_a_bare_packet_asks_for_no_answer() -> None:
    front, instance = _opened()
    (beat,) = front.tick(CONFIG.heartbeat_us).packets
    assert instance.take(beat, CONFIG.heartbeat_us).packets == []


def test_an_acknowledgement_of_what_was_never_sent_is_corrupt() -> None:
    front, _ = _opened()
    _send(front, b"a")
    assert front.take(pack(BARE, 7, 100, 0, 2), 0) == Took([], [], [])
    assert front.counters.corrupt == 1
    assert _kinds(front.tick(CONFIG.resend_us).packets) == [DATA]


# ── repetition ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_oldest_frames_are_repeated_at_growing_intervals_until_there_is_progress() -> None:
    config = replace(CONFIG, silent_us=10_000_000)
    front, instance = _opened(config)
    for i in range(10):
        _send(front, b"%d" % i)
    repeats, now_us = [], 0
    while now_us < 1_000_000:
        deadline = front.next_deadline()
        assert deadline is not None
        now_us = deadline
        packets = front.tick(now_us).packets
        if DATA in _kinds(packets):
            assert [_read(data).number for data in packets] == list(range(1, 9))
            repeats.append(now_us)
    assert repeats[:6] == [30_000, 90_000, 210_000, 450_000, 690_000, 930_000]
    assert front.counters.resent == 8 * len(repeats)
    for data in packets:
        instance.take(data, now_us)
    front.take(pack(BARE, 7, 100, 0, 9), now_us)
    assert [_read(data).number for data in front.tick(now_us).packets] == [10]
    assert front.next_deadline() == now_us + 2 * CONFIG.resend_us


def test_frames_just_sent_are_not_repeated_with_the_oldest() -> None:
    front, _ = _opened()
    _send(front, b"old", 0)
    _send(front, b"new", 20_000)
    assert [_read(data).payload for data in front.tick(30_000).packets] == [b"old"]


def test_everything_acknowledged_leaves_nothing_to_repeat() -> None:
    front, instance = _opened()
    instance.take(_send(front, b"a"), 0)
    front.take(instance.tick(CONFIG.ack_delay_us).packets[0], 3_000)
    assert front.tick(100_000).packets == []


# ── liveness ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_side_that_has_nothing_to_say_gives_signs_of_life() -> None:
    for link in _opened():
        assert link.next_deadline() == CONFIG.heartbeat_us
        assert link.tick(CONFIG.heartbeat_us - 1).packets == []
        assert _kinds(link.tick(CONFIG.heartbeat_us).packets) == [BARE]
        assert link.next_deadline() == 2 * CONFIG.heartbeat_us


def test_silence_loses_the_session_on_the_initiator_for_good() -> None:
    front, instance = _opened()
    late = _send(instance, b"late")
    assert front.tick(CONFIG.silent_us - 1).news == []
    assert front.tick(CONFIG.silent_us) == Took([], [], [Lost(7, "silent for 600 ms")])
    assert front.state is LinkState.CLOSED
    assert front.next_deadline() is None
    assert front.session is None
    assert front.take(late, CONFIG.silent_us) == Took([], [], [])
    assert front.counters.stale == 1
    front.open(CONFIG.silent_us)
    assert front.session == 8
    assert front.take(late, CONFIG.silent_us).frames == []


def test_silence_before_the_first_answer_loses_the_session_too_and_it_is_asked_again_meanwhile() -> None:
    front, _ = _pair()
    assert _kinds(front.open(0)) == [BARE]
    asked = []
    while front.session is not None:
        deadline = front.next_deadline()
        assert deadline is not None
        took = front.tick(deadline)
        asked += took.packets
    assert took.news == [Lost(7, "silent for 600 ms")]
    assert len(asked) >= CONFIG.silent_us // CONFIG.resend_us - 1


def test_an_acceptor_that_hears_nothing_ends_the_session_and_answers_it_with_reset() -> None:
    front, instance = _opened()
    packet = _send(front, b"a")
    assert instance.tick(CONFIG.acceptor_silent_us - 1).news == []
    took = instance.tick(CONFIG.acceptor_silent_us)
    assert took.news == [Lost(7, "silent for 2000 ms")]
    assert _kinds(took.packets) == [RESET]
    assert instance.session is None
    back = instance.take(packet, CONFIG.acceptor_silent_us)
    assert back.frames == []
    assert _kinds(back.packets) == [RESET]
    (news,) = front.take(back.packets[0], 0).news
    assert isinstance(news, Lost)
    assert front.take(took.packets[0], 0) == Took([], [], [])


def test_every_packet_of_the_session_is_a_sign_of_life() -> None:
    front, instance = _opened()
    assert front.take(instance.tick(500_000).packets[0], 500_000).news == []
    assert front.tick(1_099_999).news == []
    assert [type(news) for news in front.tick(1_100_000).news] == [Lost]


def test_only_packets_of_the_session_are_signs_of_life() -> None:
    front, instance = _opened()
    instance.take(pack(BARE, 6, 0, 0, 0), 1_900_000)
    instance.take(pack(BARE, 7, 99, 0, 0), 1_900_000)
    instance.take(b"noise", 1_900_000)
    assert [type(news) for news in instance.tick(2_000_000).news] == [Lost]
    front.take(pack(BARE, 6, 100, 0, 0), 500_000)
    assert [type(news) for news in front.tick(600_000).news] == [Lost]


def test_a_link_without_a_session_sends_nothing() -> None:
    for link in _pair():
        assert link.tick(10_000_000) == Took([], [], [])
        assert link.next_deadline() is None
        assert not link.is_full
        with pytest.raises(LinkClosed):
            link.send(b"a", 0)


def test_a_session_under_way_cannot_be_opened_again() -> None:
    front, _ = _opened()
    with pytest.raises(IllegalTransition, match="OPEN cannot take the move BEGIN"):
        front.open(0)


# ── sessions and lives ─────────────────────────────────────────────────────────────────────────────────────────────


def test_a_higher_session_replaces_the_one_before_and_a_lower_one_is_stale() -> None:
    _, instance = _opened(session=7)
    old = pack(DATA, 7, 100, 1, 0, b"old")
    took = instance.take(pack(DATA, 8, 0, 1, 0, b"new"), 0)
    assert took.news == [Replaced(7), Opened(8)]
    assert took.frames == [b"new"]
    assert instance.take(old, 0) == Took([], [], [])
    assert instance.counters.stale == 1
    assert _read(_send(instance, b"answer")).number == 1


def test_a_new_session_that_begins_out_of_order_waits_for_its_first_frame() -> None:
    _, instance = _pair()
    took = instance.take(pack(DATA, 7, 0, 2, 0, b"second"), 0)
    assert (took.frames, took.news) == ([], [Opened(7)])
    assert instance.take(pack(DATA, 7, 0, 1, 0, b"first"), 0).frames == [b"first", b"second"]


def test_a_restarted_acceptor_resets_a_conversation_that_began_with_the_life_before() -> None:
    front, _ = _opened(incarnation=100)
    reborn = Acceptor(200, CONFIG)
    took = reborn.take(_send(front, b"a"), 0)
    assert took.frames == []
    assert took.news == []
    assert _kinds(took.packets) == [RESET]
    assert front.take(took.packets[0], 0).news == [Lost(7, "the other side has restarted")]
    assert front.counters.resets == reborn.counters.resets == 1
    assert reborn.take(front.open(0)[0], 0).news == [Opened(8)]


def test_an_old_duplicate_that_wakes_a_restarted_acceptor_loses_the_session_and_its_answer_is_not_taken() -> None:
    front, instance = _pair(incarnation=100)
    front.open(0)
    duplicate = _send(front, b"submit")
    front.take(instance.take(duplicate, 0).packets[0], 0)
    assert front.state is LinkState.OPEN

    reborn = Acceptor(200, CONFIG)
    ghost = reborn.take(duplicate, 1_000)
    assert ghost.news == [Opened(7)]
    assert ghost.frames == [b"submit"]
    answer = _send(reborn, b"answer to the ghost", 1_000)
    took = front.take(answer, 2_000)
    assert took.frames == []
    assert took.news == [Lost(7, "the other side has restarted")]

    took = reborn.take(front.open(3_000)[0], 3_000)
    assert took.news == [Replaced(7), Opened(8)]
    assert front.take(took.packets[0], 3_000).news == [Opened(8)]
    assert front.take(answer, 4_000).frames == []
    assert reborn.take(duplicate, 4_000).frames == []


def test_a_live_packet_that_finds_the_ghost_of_its_own_session_is_reset() -> None:
    front, instance = _pair(incarnation=100)
    front.open(0)
    duplicate = _send(front, b"submit")
    front.take(instance.take(duplicate, 0).packets[0], 0)
    reborn = Acceptor(200, CONFIG)
    reborn.take(duplicate, 0)
    took = reborn.take(_send(front, b"cancel"), 0)
    assert took.frames == []
    assert _kinds(took.packets) == [RESET]


def test_the_first_answer_fixes_the_life_even_when_it_comes_late() -> None:
    front, instance = _pair(incarnation=100)
    front.open(0)
    packet = _send(front, b"a")
    late = instance.take(packet, 0).packets[0]
    reborn = Acceptor(200, CONFIG)
    fresh = reborn.take(packet, 0).packets[0]
    assert front.take(late, 0).news == [Opened(7)]
    assert [type(news) for news in front.take(fresh, 0).news] == [Lost]


def test_an_unknown_session_that_has_begun_elsewhere_is_never_begun_anew() -> None:
    _, instance = _pair(incarnation=100)
    took = instance.take(pack(DATA, 9, 100, 5, 3, b"e"), 0)
    assert _kinds(took.packets) == [RESET]
    assert (took.frames, took.news) == ([], [])


def test_a_reset_of_another_session_is_stale_and_an_acceptor_obeys_none() -> None:
    front, instance = _opened()
    assert front.take(pack(RESET, 6, 100, 0, 0), 0).news == []
    assert instance.take(pack(RESET, 7, 100, 0, 0), 0).news == []
    assert front.state is instance.state is LinkState.OPEN


def test_a_restarted_initiator_takes_over_with_a_higher_session() -> None:
    front, instance = _opened(session=7)
    old = _send(front, b"old")
    took = instance.take(Initiator(1_000, CONFIG).open(0)[0], 0)
    assert took.news == [Replaced(7), Opened(1_000)]
    assert instance.take(old, 0).frames == []


# ── bytes ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@given(
    kind=st.sampled_from((DATA, BARE, RESET)),
    session=st.integers(1, 2**64 - 1),
    incarnation=st.integers(1, 2**64 - 1),
    number=st.integers(1, 2**64 - 1),
    acked=st.integers(0, 2**64 - 1),
    payload=st.binary(max_size=100),
)
def test_a_packet_survives_the_wire(
    kind: int, session: int, incarnation: int, number: int, acked: int, payload: bytes
) -> None:
    fields = (kind, session, incarnation, number if kind == DATA else 0, acked, payload if kind == DATA else b"")
    assert unpack(pack(*fields)) == Packet(*fields)


@given(st.binary(max_size=80) | st.binary(max_size=40).map(lambda tail: pack(DATA, 7, 0, 1, 0, b"")[:-2] + tail))
def test_noise_is_counted_and_never_raises(noise: bytes) -> None:
    for link in _opened():
        before = replace(link.counters)
        assert link.take(noise, 1) == Took([], [], [])
        assert link.counters == replace(before, corrupt=before.corrupt + 1)


@given(payload=st.binary(max_size=30), data=st.data())
def test_every_flipped_bit_is_found(payload: bytes, data: st.DataObject) -> None:
    _, instance = _opened()
    packet = bytearray(pack(DATA, 7, 100, 1, 0, payload))
    bit = data.draw(st.integers(0, 8 * len(packet) - 1))
    packet[bit // 8] ^= 1 << bit % 8
    assert instance.take(bytes(packet), 1) == Took([], [], [])
    assert instance.counters.corrupt == 1


@pytest.mark.parametrize(
    "packet",
    [
        pack(4, 7, 100, 0, 0),
        pack(DATA, 7, 100, 0, 0, b"no number"),
        pack(BARE, 7, 100, 1, 0),
        pack(BARE, 7, 100, 0, 0, b"payload"),
        pack(BARE, 0, 100, 0, 0),
        pack(BARE, 7, 0, 0, 1),
    ],
)
def test_a_sound_checksum_does_not_make_nonsense_a_packet(packet: bytes) -> None:
    assert unpack(packet) is None


def test_another_version_or_size_is_corrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    assert unpack(pack(DATA, 7, 0, 1, 0, bytes(FRAME_BYTES_MAX + 1))) is None
    assert unpack(bytes(HEADER_BYTES - 1)) is None
    assert PACKET_BYTES_MAX == HEADER_BYTES + FRAME_BYTES_MAX
    monkeypatch.setattr(wire_link, "LINK_VERSION", 2)
    packet = pack(BARE, 7, 0, 0, 0)
    monkeypatch.undo()
    assert unpack(packet) is None


def test_an_acceptor_that_does_not_say_who_it_is_is_not_heard() -> None:
    front, _ = _pair()
    front.open(0)
    assert front.take(pack(BARE, 7, 0, 0, 0), 0).news == []
    assert front.counters.corrupt == 1


# ── settings ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "wrong",
    [
        {"window": 0},
        {"backlog_max": 0},
        {"ack_delay_us": 0},
        {"ack_delay_us": 50_000},
        {"resend_us": 500_000},
        {"heartbeat_us": 700_000},
        {"acceptor_silent_us": 100_000},
    ],
)
def test_settings_that_cannot_work_are_refused_by_name(wrong: dict[str, int]) -> None:
    with pytest.raises(BadConfig, match=next(iter(wrong))):
        LinkConfig(**wrong)


@pytest.mark.parametrize("number", [0, -1, 2**64])
def test_numbers_that_do_not_fit_are_refused(number: int) -> None:
    with pytest.raises(BadConfig, match="first_session"):
        Initiator(number, CONFIG)
    with pytest.raises(BadConfig, match="incarnation"):
        Acceptor(number, CONFIG)


# ── a bad network ──────────────────────────────────────────────────────────────────────────────────────────────────


class World:
    """Two links, a network that draws its faults from a seed, and witnesses of what each session sent and delivered."""

    def __init__(self, seed: int, loss: float, repeat: float, corrupt: float, delay_us: int, config: LinkConfig) -> None:
        self._random = random.Random(seed)
        self.loss, self.repeat, self.corrupt, self.delay_us = loss, repeat, corrupt, delay_us
        self.cut = False
        self.config = config
        self.now_us = 0
        self._lives = count(1_000)
        self._order = count()
        self._road: list[tuple[int, int, int, bytes]] = []
        self.links: list[Link] = [Initiator(1, config), Acceptor(next(self._lives), config)]
        self.sent: dict[tuple[int, int, int], list[bytes]] = {}
        """(who sent it, session, life of the instance or 0) → frames."""
        self.got: dict[tuple[int, int], list[bytes]] = {}
        """(who got it, session) → frames; those that the instance got in its present life only."""
        self.told: list[tuple[int, News]] = []
        self.ghosts = 0
        self._newest_session = 0

    @property
    def front(self) -> Initiator:
        assert isinstance(self.links[FRONT], Initiator)
        return self.links[FRONT]

    @property
    def instance(self) -> Acceptor:
        assert isinstance(self.links[INSTANCE], Acceptor)
        return self.links[INSTANCE]

    @property
    def lost(self) -> list[str]:
        return [news.reason for who, news in self.told if who == FRONT and isinstance(news, Lost)]

    def send(self, who: int) -> None:
        link = self.links[who]
        if link.session is None or link.is_full:
            return
        life = self.instance.incarnation if who == INSTANCE else 0
        frames = self.sent.setdefault((who, link.session, life), [])
        frame = b"%d/%d/%d/%d" % (who, link.session, life, len(frames))
        frames.append(frame)
        self._post(who, link.send(frame, self.now_us))

    def open(self) -> None:
        if self.front.session is None:
            self._post(FRONT, self.front.open(self.now_us))

    def restart(self) -> None:
        """The instance dies and comes back; what it had sent may still be under way."""
        self.links[INSTANCE] = Acceptor(next(self._lives), self.config)
        self._newest_session = 0
        for key in [key for key in self.got if key[0] == INSTANCE]:
            del self.got[key]

    def run(self, until_us: int) -> None:
        while (at_us := self._next_us()) is not None and at_us <= until_us:
            self.now_us = max(self.now_us, at_us)
            if self._road and self._road[0][0] <= self.now_us:
                _, _, to, data = heapq.heappop(self._road)
                self._took(to, self.links[to].take(data, self.now_us))
                continue
            for who, link in enumerate(self.links):
                deadline = link.next_deadline()
                if deadline is not None and deadline <= self.now_us:
                    self._took(who, link.tick(self.now_us))
                    after = link.next_deadline()
                    assert after is None or after > self.now_us, "a tick leaves nothing due"
        self.now_us = max(self.now_us, until_us)

    def heal(self) -> None:
        self.loss = self.repeat = self.corrupt = 0.0
        self.delay_us = 1_000
        self.cut = False

    def _next_us(self) -> int | None:
        times = [deadline for link in self.links if (deadline := link.next_deadline()) is not None]
        if self._road:
            times.append(self._road[0][0])
        return min(times, default=None)

    def _post(self, who: int, packets: list[bytes]) -> None:
        for packet in packets:
            copies = 1 + (self._random.random() < self.repeat)
            for copy in range(copies):
                if self.cut or self._random.random() < self.loss:
                    continue
                data = packet
                if self._random.random() < self.corrupt:
                    at = self._random.randrange(len(data))
                    data = data[:at] + bytes([data[at] ^ 1 << self._random.randrange(8)]) + data[at + 1 :]
                # The second copy may linger for long: it is what meets later sessions and lives.
                arrives_us = self.now_us + self._random.randint(0, self.delay_us if not copy else 10 * self.delay_us)
                heapq.heappush(self._road, (arrives_us, next(self._order), 1 - who, data))

    def _took(self, who: int, took: Took) -> None:
        self.told += [(who, news) for news in took.news]
        for news in took.news:
            if who == INSTANCE and isinstance(news, Opened):
                assert news.session > self._newest_session, "an old session never comes back in the same life"
                self._newest_session = news.session
        session = self.links[who].session
        if took.frames:
            assert session is not None
            self._witness(who, session, took.frames)
        self._post(who, took.packets)
        self._check_bounds(who)
        if who == INSTANCE:
            for _ in took.frames:
                self.send(INSTANCE)  # an answer, also to a ghost

    def _witness(self, who: int, session: int, frames: list[bytes]) -> None:
        """What a side has got in a session is the beginning of what the other side, in one life, has sent in it."""
        got = self.got.setdefault((who, session), [])
        got += frames
        life = int(got[0].split(b"/")[2])
        assert got == self.sent[1 - who, session, life][: len(got)]
        self.ghosts += who == INSTANCE and session != self.front.session

    def _check_bounds(self, who: int) -> None:
        talk = self.links[who]._talk
        if talk is not None:
            assert len(talk._flying) <= self.config.window
            assert len(talk._early) < self.config.window
            assert len(talk._backlog) <= self.config.backlog_max

    def delivered_all(self) -> bool:
        session = self.front.session
        return session is not None and all(
            self.sent.get((who, session, life), []) == self.got.get((1 - who, session), [])
            for who, life in ((FRONT, 0), (INSTANCE, self.instance.incarnation))
        )


small = LinkConfig(window=8, backlog_max=16, ack_every=4)
worlds = st.builds(
    World,
    seed=st.integers(0, 2**32),
    loss=st.floats(0, 0.5),
    repeat=st.floats(0, 0.5),
    corrupt=st.floats(0, 0.2),
    delay_us=st.integers(0, 80_000),
    config=st.sampled_from((small, replace(small, window=1, ack_every=1), CONFIG)),
)
acts = st.lists(
    st.tuples(st.sampled_from(("front", "instance", "wait", "idle", "open", "cut", "mend", "restart")), st.integers(1, 20)),
    min_size=10,
    max_size=80,
)


def _act(world: World, act: str, amount: int) -> None:
    match act:
        case "front" | "instance":
            for _ in range(amount):
                world.send(FRONT if act == "front" else INSTANCE)
        case "wait":
            world.run(world.now_us + amount * 10_000)
        case "idle":
            world.run(world.now_us + amount * 150_000)
        case "open":
            world.open()
        case "cut" | "mend":
            world.cut = act == "cut"
        case "restart":
            world.restart()


@settings(max_examples=150, deadline=None)
@given(world=worlds, acts=acts)
def test_whatever_the_network_does_frames_arrive_once_and_in_order_or_the_session_is_lost(
    world: World, acts: list[tuple[str, int]]
) -> None:
    _chaos_then_healing(world, acts)


def _chaos_then_healing(world: World, acts: list[tuple[str, int]]) -> None:
    world.open()
    for act, amount in acts:
        _act(world, act, amount)
        world.run(world.now_us + 1_000)
    world.heal()
    # The last copies of the bad times arrive (800 ms), then at the latest silence (600 ms) ends what cannot go on.
    world.run(world.now_us + 1_500_000)
    world.open()
    world.run(world.now_us + 100_000)
    for who in (FRONT, INSTANCE) * 10:
        world.send(who)
    world.run(world.now_us + 1_200_000)
    assert world.delivered_all()
    assert world.front.state is world.instance.state is LinkState.OPEN
    assert world.front.session == world.instance.session


def test_the_chaos_reaches_every_way_in_which_a_session_can_end() -> None:
    """The claim above is worth what its faults are worth: each must have happened."""
    counters, seen, ghosts = Counter[str](), Counter[str](), 0
    for seed in range(120):
        draw = random.Random(seed)
        world = World(seed, draw.uniform(0, 0.5), draw.uniform(0, 0.5), 0.1, draw.randrange(80_000), small)
        kinds = ("front", "instance", "wait", "wait", "idle", "open", "open", "cut", "mend", "mend", "restart")
        _chaos_then_healing(world, [(draw.choice(kinds), draw.randint(1, 20)) for _ in range(60)])
        seen.update(f"{who} {type(news).__name__} {getattr(news, 'reason', '')[:10]}" for who, news in world.told)
        ghosts += world.ghosts
        for link in world.links:
            counters.update(asdict(link.counters))
    assert ghosts
    assert all(counters.values()), counters
    assert sorted(seen) == [
        "0 Lost silent for",
        "0 Lost the other ",
        "0 Opened ",
        "1 Lost silent for",
        "1 Opened ",
        "1 Replaced ",
    ]


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**32), loss=st.floats(0, 0.3), repeat=st.floats(0, 0.5), delay_us=st.integers(0, 20_000))
def test_a_patient_session_survives_a_bad_network(seed: int, loss: float, repeat: float, delay_us: int) -> None:
    patient = LinkConfig(silent_us=5_000_000, acceptor_silent_us=5_000_000)
    world = World(seed, loss, repeat, 0.05, delay_us, patient)
    world.open()
    for _ in range(40):
        for who in (FRONT, INSTANCE) * 3:
            world.send(who)
        world.run(world.now_us + 5_000)
    world.run(world.now_us + 5_000_000)
    assert world.lost == []
    assert world.delivered_all()
    assert len(world.got[INSTANCE, 1]) == 120


def test_frames_survive_a_connection_that_breaks_and_comes_back() -> None:
    world = World(0, 0, 0, 0, 200, CONFIG)
    world.open()
    world.run(1_000)
    for step in range(200):
        world.cut = step % 20 >= 15
        world.send(FRONT)
        world.run(world.now_us + 10_000)
    world.heal()
    world.run(world.now_us + 500_000)
    assert world.lost == []
    assert len(world.got[INSTANCE, 1]) == len(world.got[FRONT, 1]) == 200
    assert world.delivered_all()


def test_either_side_can_close_a_session_and_the_other_learns_of_it_when_it_speaks() -> None:
    initiator, acceptor = Initiator(1, LinkConfig()), Acceptor(5, LinkConfig())
    answer = acceptor.take(initiator.open(0)[0], 0).packets
    initiator.take(answer[0], 0)
    (reset,) = acceptor.close("enough")
    assert acceptor.session is None
    assert acceptor.next_deadline() is None
    assert [type(news).__name__ for news in initiator.take(reset, 0).news] == ["Lost"]
    again = initiator.open(1)[0]
    assert [type(news).__name__ for news in acceptor.take(again, 1).news] == ["Opened"]
    assert initiator.close("enough") == []
    assert initiator.session is None
    assert initiator.close("twice") == []
