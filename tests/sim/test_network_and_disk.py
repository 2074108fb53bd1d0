"""Each fault of the network and of the disk does what its name says, and none happens unasked."""

from __future__ import annotations

from baton.sim.disk import SimulatedDisk
from baton.sim.faults import DiskRates, Fault, NetworkRates
from baton.sim.network import SimulatedNetwork, Socket
from baton.sim.world import Host, World


class End:
    """Who holds one end of a connection: records what it is told."""

    def __init__(self, world: World, socket: Socket | None = None) -> None:
        self.world = world
        self.socket = socket
        self.arrived: list[tuple[int, bytes]] = []
        self.told: list[str | None] = []
        self.room = 0

    def connected(self) -> None:
        self.told.append("connected")

    def received(self, data: bytes) -> None:
        self.arrived.append((self.world.now_us, data))

    def ended(self, error: str | None) -> None:
        self.told.append(error)

    def has_room(self) -> None:
        self.room += 1

    @property
    def data(self) -> bytes:
        return b"".join(data for _, data in self.arrived)


class Wire:
    """Two processes, one of which has connected to the other."""

    def __init__(self, rates: NetworkRates, **limits: int) -> None:
        self.world = World(11, events_max=100_000)
        self.network = SimulatedNetwork(self.world, NetworkRates(), **limits)
        self.source, self.target = Host(self.world, "a"), Host(self.world, "b")
        self.there: list[End] = []
        self.network.listen("b", self.target, self._accept)
        self.here = self.connect()
        self.run(10_000)
        self.network.rates = rates

    def connect(self) -> End:
        end = End(self.world)
        end.socket = self.network.connect("a", "b", self.source, end)
        return end

    def _accept(self, socket: Socket) -> End:
        self.there.append(End(self.world, socket))
        return self.there[-1]

    def write(self, data: bytes) -> None:
        assert self.here.socket is not None
        self.here.socket.write(data)

    def send(self, count: int = 100, gap_us: int = 1000) -> list[bytes]:
        writes = [number.to_bytes(4, "little") for number in range(count)]
        for at, data in enumerate(writes):
            self.world.at(self.world.now_us + at * gap_us, self.write, data)
        self.run(count * gap_us + 400_000)
        return writes

    def run(self, for_us: int) -> None:
        until_us = self.world.now_us + for_us
        while self.world.next_us is not None and self.world.next_us <= until_us:
            self.world.step()
        self.world.now_us = until_us


def test_without_faults_everything_arrives_once_and_in_order() -> None:
    wire = Wire(NetworkRates(jitter_us=5_000))
    sent = wire.send()
    assert wire.there[0].data == b"".join(sent)
    assert wire.here.told == wire.there[0].told == ["connected"]
    assert not wire.world.fired


def test_what_is_written_at_one_time_arrives_at_once_and_costs_one_event() -> None:
    wire = Wire(NetworkRates())
    before = wire.world.events
    for _ in range(50):
        wire.write(b"ab")
    wire.run(10_000)
    assert [data for _, data in wire.there[0].arrived] == [b"ab" * 50]
    assert wire.world.events - before == 1


def test_pieces_are_the_whole_in_parts() -> None:
    wire = Wire(NetworkRates(pieces=1.0))
    wire.write(bytes(range(200)))
    wire.run(10_000)
    assert len(wire.there[0].arrived) > 1
    assert wire.there[0].data == bytes(range(200))


def test_a_reset_ends_both_ends_and_what_came_before_is_a_prefix() -> None:
    cut = 0
    for seed in range(20):
        wire = Wire(NetworkRates(reset=0.1))
        wire.world.stream(f"{seed}")
        sent = b"".join(wire.send(60 + seed))
        assert sent.startswith(wire.there[0].data)
        assert wire.here.told[1:] == wire.there[0].told[1:] == ["Connection reset by peer"]
        cut += wire.world.fired[Fault.RESET] + wire.world.fired[Fault.TRUNCATION]
    assert cut == 20


def test_a_spike_delays_and_keeps_the_order() -> None:
    wire = Wire(NetworkRates(spike=0.1, spike_us=100_000))
    assert b"".join(wire.send()) == wire.there[0].data
    assert wire.world.fired[Fault.DELAY] > 0


def test_a_flipped_bit_is_one_bit() -> None:
    wire = Wire(NetworkRates(bit_flip=1.0))
    sent = wire.send(20)
    came = [data for _, data in wire.there[0].arrived]
    for was, now in zip(sent, came, strict=True):
        assert (int.from_bytes(was, "little") ^ int.from_bytes(now, "little")).bit_count() == 1


def test_somebody_in_between_repeats_takes_out_and_sends_back() -> None:
    wire = Wire(NetworkRates(tamper=1.0))
    sent = wire.send(60)
    fired, there = wire.world.fired, wire.there[0]
    assert min(fired[Fault.REPEATED], fired[Fault.OMITTED], fired[Fault.MIRRORED]) > 0
    assert len(there.data) // 4 == len(sent) + fired[Fault.REPEATED] - fired[Fault.OMITTED]
    assert len(wire.here.data) // 4 == fired[Fault.MIRRORED]


def test_a_partition_holds_everything_until_it_is_joined() -> None:
    wire = Wire(NetworkRates())
    wire.network.cut("a", "b")
    sent = wire.send(10)
    assert not wire.there[0].arrived
    late = wire.connect()
    wire.run(1_000_000)
    assert late.told == ["Connection timed out"]
    wire.network.join("a", "b")
    wire.run(10_000)
    assert wire.there[0].data == b"".join(sent)


def test_a_partition_that_lasts_breaks_the_connection_of_who_writes_and_of_nobody_else() -> None:
    wire = Wire(NetworkRates(), unacknowledged_us=200_000)
    wire.network.cut("a", "b")
    wire.send(2)
    assert wire.here.told == ["connected", "Connection timed out"]
    assert wire.there[0].told == ["connected"]
    wire.network.join("a", "b")
    assert wire.there[0].socket is not None
    wire.there[0].socket.write(b"?")
    wire.run(100_000)
    assert wire.there[0].told == ["connected", "Connection reset by peer"]


def test_what_a_stall_held_arrives_when_it_is_cleared_and_new_connections_are_free() -> None:
    wire = Wire(NetworkRates())
    wire.network.stall("a", "b")
    sent = wire.send(10)
    assert not wire.there[0].arrived
    assert wire.connect().told == []
    wire.run(10_000)
    assert len(wire.there) == 2
    wire.network.clear("a", "b")
    wire.run(10_000)
    assert wire.there[0].data == b"".join(sent)


def test_who_is_not_read_has_unread_bytes_and_hears_when_there_is_room() -> None:
    wire = Wire(NetworkRates(), window_bytes=8)
    wire.target.pause()
    wire.send(10)
    assert wire.here.socket is not None
    assert wire.here.socket.unread == 40
    wire.here.socket.wait_for_room()
    wire.target.resume()
    wire.run(10_000)
    assert (wire.here.socket.unread, wire.here.room) == (0, 1)


def test_a_process_that_died_is_reset_where_its_machine_says_so() -> None:
    wire = Wire(NetworkRates(tells=1.0))
    wire.target.crash()
    wire.network.process_died(wire.target)
    wire.run(10_000)
    assert wire.here.told == ["connected", "Connection reset by peer"]


def test_a_machine_that_vanished_is_noticed_by_who_writes_alone() -> None:
    wire = Wire(NetworkRates(), unacknowledged_us=200_000)
    wire.target.crash()
    wire.network.process_died(wire.target)
    wire.run(1_000_000)
    assert wire.here.told == ["connected"]
    assert wire.world.fired == {Fault.HALF_OPEN: 1}
    wire.send(1)
    assert wire.here.told == ["connected", "Connection timed out"]


def test_the_next_life_of_a_process_knows_nothing_of_an_old_connection() -> None:
    wire = Wire(NetworkRates())
    wire.target.crash()
    wire.network.process_died(wire.target)
    assert wire.connect().told == []
    wire.target.restart()
    wire.run(10_000)
    assert wire.connect().told == []
    wire.network.listen("b", wire.target, wire._accept)
    wire.send(1)
    assert wire.here.told == ["connected", "Connection reset by peer"]
    assert not wire.there[0].arrived


def test_nobody_listens_where_the_process_is_gone() -> None:
    wire = Wire(NetworkRates())
    wire.target.crash()
    wire.network.process_died(wire.target)
    nowhere = wire.connect()
    wire.run(2_000_000)
    assert nowhere.told == ["Connection timed out"]
    wire.target.restart()
    refused = wire.connect()
    wire.run(10_000)
    assert refused.told == ["Connection refused"]


def test_closing_delivers_what_was_written_and_aborting_may_not() -> None:
    wire = Wire(NetworkRates())
    wire.write(b"last words")
    assert wire.here.socket is not None
    wire.here.socket.close()
    wire.run(10_000)
    assert wire.there[0].data == b"last words"
    assert wire.there[0].told == ["connected", None]


def test_healing_ends_every_fault() -> None:
    wire = Wire(NetworkRates(reset=1.0))
    wire.network.cut("a", "b")
    wire.network.stall("b", "a")
    wire.network.heal()
    assert b"".join(wire.send(10)) == wire.there[0].data


def test_a_host_that_is_down_receives_nothing() -> None:
    wire = Wire(NetworkRates())
    wire.target.crash()
    wire.send(10)
    assert wire.there[0].arrived == []


def disk(rates: DiskRates) -> tuple[World, SimulatedDisk]:
    world = World(5, events_max=10_000)
    return world, SimulatedDisk(Host(world, "host"), rates)


def write(world: World, target: SimulatedDisk, data: bytes) -> bool:
    answers: list[bool] = []
    target.write("file", data, answers.append)
    while world.next_us is not None:
        world.step()
    return answers[0]


def read(world: World, target: SimulatedDisk) -> bytes | None:
    answers: list[bytes | None] = []
    target.read("file", answers.append)
    while world.next_us is not None:
        world.step()
    return answers[0]


DATA = bytes(range(64))


def test_a_sound_disk_gives_back_what_was_written_also_after_a_crash() -> None:
    world, target = disk(DiskRates())
    assert read(world, target) is None
    assert write(world, target, DATA)
    target.crash()
    assert read(world, target) == DATA


def test_a_full_disk_says_so_and_keeps_the_old_file() -> None:
    world, target = disk(DiskRates())
    write(world, target, b"old")
    target.rates = DiskRates(full=1.0)
    assert not write(world, target, DATA)
    assert read(world, target) == b"old"


def test_a_torn_write_leaves_a_part() -> None:
    world, target = disk(DiskRates(torn=1.0))
    write(world, target, DATA)
    kept = read(world, target)
    assert kept is not None
    assert DATA.startswith(kept)
    assert len(kept) < len(DATA)


def test_a_lost_write_brings_the_old_file_back_after_a_crash() -> None:
    world, target = disk(DiskRates())
    write(world, target, b"old")
    world.at(world.now_us + 1_000_000, lambda: None)
    while world.next_us is not None:
        world.step()
    target.rates = DiskRates(lost=1.0)
    write(world, target, DATA)
    target.crash()
    assert read(world, target) == b"old"


def test_a_corrupt_read_differs_in_one_bit() -> None:
    world, target = disk(DiskRates(corrupt=1.0))
    write(world, target, DATA)
    spoilt = read(world, target)
    assert spoilt is not None
    assert sum((a ^ b).bit_count() for a, b in zip(spoilt, DATA, strict=True)) == 1


def test_a_slow_disk_answers_late() -> None:
    world, target = disk(DiskRates(slow=1.0))
    write(world, target, DATA)
    assert world.now_us > 1_000
    assert world.fired[Fault.DISK_SLOW] == 1
