"""A seat: the host and disk on which the lives of one instance follow each other, and its line to the front end.

Owns starting, crashing and restarting. A life is an `Instance`; the seat gives it a line when it has started, and passes on
what the line tells.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from baton.sim.disk import Disk
from baton.sim.faults import DiskRates, Fault
from baton.sim.front import Counter
from baton.sim.instance import Instance, InstanceSpec, Watcher
from baton.sim.lines import LinkEnd, acceptor
from baton.sim.neighbours import Neighbours
from baton.sim.network import Network
from baton.sim.transfer import Fabric
from baton.sim.world import Host, World
from baton.wire.link import LinkConfig

FRONT = "front"


def seat_name(number: int) -> str:
    return f"instance {number}"


class Seat:
    def __init__(
        self,
        world: World,
        network: Network,
        spec: InstanceSpec,
        counter: Counter,
        link: LinkConfig,
        disk: DiskRates,
        watcher: Watcher | None = None,
        fabric: Fabric | None = None,
        peers: Sequence[str] = (),
    ) -> None:
        self.name = seat_name(spec.number)
        self.role = spec.config.role
        self.peers = peers
        """The names of the seats it hands over to, or is handed over from."""
        self.neighbours: Neighbours | None = None
        """Of the present life, once it has started."""
        self.peer_lines: list[LinkEnd] = []
        """Of all lives."""
        self.when_dead: Callable[[Seat], None] | None = None
        self.at_step: Callable[[Seat, str], None] | None = None
        """Called at each step of a hand-over that is taken here."""
        self._fabric = fabric
        self.counter = counter
        self.host = Host(world, self.name)
        self.disk = Disk(self.host, disk)
        self.instance: Instance | None = None
        """The present life; None while the host is down."""
        self._network = network
        self._spec = spec
        self._link = link
        self._watcher = watcher
        self._troubled_until_us = 0
        self._rolled_until_us = 0
        self._rolling = False
        """Between two lives of a rolling restart."""
        self.line: LinkEnd | None = None
        """Of the present life."""
        self.lines: list[LinkEnd] = []
        """Of all lives."""
        self.when_opened: Callable[[Seat], None] | None = None
        """Called when the present life has taken up a session."""
        self.disagreement = 0.0
        self.slowness = 1.0

    def troubled_until_us(self, *, rolling_too: bool) -> int:
        """Until when something was wrong here that can end a session: now, while it is."""
        absent = self.instance is None or self.instance.worker is None
        rolls = self._rolling or (self.instance is not None and self.instance.is_leaving)
        if self.host.paused or (absent and not self._rolling) or (rolls and rolling_too):
            return self.host.world.now_us
        return max(self._troubled_until_us, self._rolled_until_us if rolling_too else 0)

    def trouble(self, for_us: int = 0) -> None:
        self._troubled_until_us = max(self._troubled_until_us, self.host.world.now_us + for_us)

    def boot(self) -> None:
        if not self._rolling:
            self.trouble()
        self.host.restart()
        life = Instance(self.host, self.disk, self._spec, self._watcher)
        life.device.disagreement, life.device.slowness = self.disagreement, self.slowness
        self.instance = life
        self._note(f"starts life {self.host.lives + 1}")
        life.start(self._serve)

    def crash(self) -> None:
        if self.instance is None:
            return
        if self._watcher is not None:
            self._watcher.buried(self.instance)
        self.instance = None
        self.line = None
        self.neighbours = None
        if self._fabric is not None:
            self._fabric.leave(self.name)
        self.host.resume()
        self.host.crash()
        self.disk.crash()
        self._note("is down")
        if self.when_dead is not None:
            self.when_dead(self)

    def fail(self) -> None:
        """The engine ends by itself, with last words."""
        if self.instance is not None and not self.host.paused:
            self.host.world.fire(Fault.ENGINE_FAILURE, self.name)
            self.instance.fail("a simulated fault of the device")
            self.crash()

    def restart_when_idle(self, down_us: int) -> None:
        """A drain has been ordered: when everything open has ended, the next life begins."""
        if self.instance is not None and self.instance.worker is not None:
            self.instance.restart_when_idle(lambda: self._cycle(down_us))

    def set_device(self, *, slowness: float | None = None, disagreement: float | None = None) -> None:
        self.slowness = self.slowness if slowness is None else slowness
        self.disagreement = self.disagreement if disagreement is None else disagreement
        if self.instance is not None:
            self.instance.device.slowness = self.slowness
            self.instance.device.disagreement = self.disagreement

    def _cycle(self, down_us: int) -> None:
        self.crash()
        self._rolling = True
        self.host.world.after(down_us, self.boot_if_down)

    def boot_if_down(self) -> None:
        if self.instance is None:
            self.boot()

    def pause(self) -> None:
        self.host.pause()

    def resume(self) -> None:
        self.trouble()
        if self.instance is not None:
            self.instance.hindered_us = self.host.world.now_us
        self.host.resume()

    def _serve(self, life: Instance) -> None:
        if self._rolling:
            self._rolling = False
            self._rolled_until_us = self.host.world.now_us
        else:
            self.trouble()
        end = _Answering(self, life)
        self.line = acceptor(self.host, self._network, self.name, f"{FRONT} {self._spec.number}", end, self._link)
        self.lines.append(self.line)
        if self._fabric is not None and self.peers:
            self._meet(life, self._fabric)

    def _meet(self, life: Instance, fabric: Fabric) -> None:
        self.neighbours = life.peers = Neighbours(life, self._network, fabric, self._link, self.peers)
        self.peer_lines += self.neighbours.lines
        life.device.signals = self.neighbours.sender
        life.at_step = self._step_taken
        self.neighbours.open()

    def _step_taken(self, step: str) -> None:
        if self.at_step is not None:
            self.at_step(self, step)

    def _note(self, what: str) -> None:
        if self.host.world.keeps_notes:
            self.host.world.note(self.name, what)


class _Answering:
    """The instance's end of its line."""

    def __init__(self, seat: Seat, life: Instance) -> None:
        self._seat = seat
        self._life = life

    def opened(self) -> None:
        seat, line = self._seat, self._seat.line
        if line is None:
            raise RuntimeError(f"{seat.name} took up a session without a line")
        if seat.counter.knows_another_life(line.link):
            seat.host.world.fire(Fault.GHOST, seat.name)
        self._life.answer(line)
        if seat.when_opened is not None:
            seat.when_opened(seat)

    def lost(self, _reason: str) -> None:
        self._life.orphan()

    def took(self, frames: list[bytes]) -> None:
        self._life.take(frames)
