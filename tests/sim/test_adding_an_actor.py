"""The example of docs/design/simulator.md, as it stands there, joins a world and meets its faults."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

from baton.sim.faults import Fault, NetworkRates
from baton.sim.network import SimulatedNetwork, Socket
from baton.sim.world import Host, World

DOCUMENT = Path(__file__).parents[2] / "docs" / "design" / "simulator.md"


def beacon_class() -> Any:
    (source,) = re.findall(r"```python\n(class Beacon:.*?)```", DOCUMENT.read_text(), re.DOTALL)
    names: dict[str, Any] = {"Host": Host, "SimulatedNetwork": SimulatedNetwork, "World": World}
    exec(source, names)  # noqa: S102  our own document
    return names["Beacon"]


class Echo:
    def __init__(self, socket: Socket) -> None:
        self._socket = socket

    def connected(self) -> None:
        pass

    def received(self, data: bytes) -> None:
        self._socket.write(data)

    def ended(self, error: str | None) -> None:
        pass

    def has_room(self) -> None:
        pass


def heard(rates: NetworkRates) -> tuple[Any, Counter[str]]:
    world = World(3, events_max=10_000)
    network = SimulatedNetwork(world, rates)
    network.listen("peer", Host(world, "peer"), Echo)
    beacon = beacon_class()(world, network, "peer")
    while world.next_us is not None and world.next_us < 5_000_000:
        world.step()
    return beacon, world.fired


def test_the_documented_actor_works() -> None:
    beacon, fired = heard(NetworkRates())
    assert beacon.heard == 100
    assert not fired


def test_it_meets_the_faults_of_its_world() -> None:
    beacon, fired = heard(NetworkRates(reset=0.05))
    assert beacon.heard < 80
    assert beacon.error == "Connection reset by peer"
    assert fired[Fault.RESET] + fired[Fault.TRUNCATION] == 1
