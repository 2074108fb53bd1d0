"""Each fault of the network and of the disk does what its name says, and none happens unasked."""

from __future__ import annotations

from baton.sim.disk import SimulatedDisk
from baton.sim.faults import DiskRates, Fault, NetworkRates
from baton.sim.network import SimulatedNetwork
from baton.sim.world import Host, World


class Wire:
    """Two hosts, and what arrived at the second."""

    def __init__(self, rates: NetworkRates) -> None:
        self.world = World(11, events_max=100_000)
        self.network = SimulatedNetwork(self.world, rates)
        self.target = Host(self.world, "b")
        self.arrived: list[tuple[int, bytes]] = []
        self.network.attach("b", self.target, lambda _sender, packet: self.arrived.append((self.world.now_us, packet)))

    def send(self, count: int = 100, gap_us: int = 1000) -> list[bytes]:
        packets = [number.to_bytes(4, "little") for number in range(count)]
        for at, packet in enumerate(packets):
            self.world.at(self.world.now_us + at * gap_us, self.network.send, "a", "b", packet)
        self.run()
        return packets

    def run(self) -> None:
        while self.world.next_us is not None:
            self.world.step()

    @property
    def packets(self) -> list[bytes]:
        return [packet for _, packet in self.arrived]


def test_without_faults_everything_arrives_once_and_in_order() -> None:
    wire = Wire(NetworkRates(jitter_us=5_000))
    assert wire.send() == wire.packets
    assert not wire.world.fired


def test_loss_loses_its_share() -> None:
    wire = Wire(NetworkRates(loss=0.3))
    wire.send(1000)
    assert wire.world.fired[Fault.LOSS] == 1000 - len(wire.arrived)
    assert 200 < wire.world.fired[Fault.LOSS] < 400


def test_a_duplicate_is_the_same_packet_again_and_later() -> None:
    wire = Wire(NetworkRates(duplication=0.5, late_us=40_000))
    sent = wire.send()
    assert sorted(set(wire.packets)) == sorted(sent)
    assert len(wire.arrived) == 100 + wire.world.fired[Fault.DUPLICATION]


def test_reordering_lets_others_overtake() -> None:
    wire = Wire(NetworkRates(reordering=0.3, late_us=40_000))
    sent = wire.send()
    assert wire.packets != sent
    assert sorted(wire.packets) == sorted(sent)
    assert wire.world.fired[Fault.REORDERING] > 0


def test_a_spike_delays_and_keeps_the_order() -> None:
    wire = Wire(NetworkRates(spike=0.1, spike_us=100_000))
    assert wire.send() == wire.packets
    assert wire.world.fired[Fault.DELAY] > 0


def test_a_flipped_bit_is_one_bit() -> None:
    wire = Wire(NetworkRates(bit_flip=1.0))
    sent = wire.send(20)
    for was, came in zip(sent, wire.packets, strict=True):
        assert (int.from_bytes(was, "little") ^ int.from_bytes(came, "little")).bit_count() == 1


def test_a_partition_lets_nothing_through_until_it_is_joined() -> None:
    wire = Wire(NetworkRates())
    wire.network.cut("a", "b")
    wire.send(10)
    assert wire.arrived == []
    wire.network.join("a", "b")
    assert wire.send(10) == wire.packets


def test_what_a_clog_held_arrives_when_it_is_cleared() -> None:
    wire = Wire(NetworkRates())
    wire.network.clog("a", "b")
    sent = wire.send(10)
    assert wire.arrived == []
    wire.network.clear("a", "b")
    wire.run()
    assert wire.packets == sent


def test_healing_ends_every_fault() -> None:
    wire = Wire(NetworkRates(loss=1.0))
    wire.network.cut("a", "b")
    wire.network.clog("b", "a")
    wire.network.heal()
    assert wire.send(10) == wire.packets


def test_a_host_that_is_down_receives_nothing() -> None:
    wire = Wire(NetworkRates())
    wire.target.crash()
    wire.send(10)
    assert wire.arrived == []


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
