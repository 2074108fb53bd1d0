"""The example of docs/design/simulator.md, as it stands there, joins a world and meets its faults."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from baton.sim.faults import Fault, NetworkRates
from baton.sim.network import SimulatedNetwork
from baton.sim.world import Host, World

DOCUMENT = Path(__file__).parents[2] / "docs" / "design" / "simulator.md"


def beacon_class() -> Any:
    (source,) = re.findall(r"```python\n(class Beacon:.*?)```", DOCUMENT.read_text(), re.DOTALL)
    names: dict[str, Any] = {
        "Counter": Counter,
        "Host": Host,
        "SimulatedNetwork": SimulatedNetwork,
        "Sequence": Sequence,
        "World": World,
    }
    exec(source, names)  # noqa: S102  our own document
    return names["Beacon"]


def heard(rates: NetworkRates) -> tuple[int, Counter[str]]:
    world = World(3, events_max=10_000)
    network = SimulatedNetwork(world, rates)
    peer = Host(world, "peer")
    network.attach("peer", peer, lambda sender, packet: network.send("peer", sender, packet))
    beacon = beacon_class()(world, network, ["peer"])
    while world.next_us is not None and world.next_us < 5_000_000:
        world.step()
    return beacon.heard["peer"], world.fired


def test_the_documented_actor_works() -> None:
    assert heard(NetworkRates())[0] == 99


def test_it_meets_the_faults_of_its_world() -> None:
    answers, fired = heard(NetworkRates(loss=0.3))
    assert answers < 80
    assert fired[Fault.LOSS] > 20
