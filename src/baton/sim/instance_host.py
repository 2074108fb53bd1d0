"""The host and disk of one instance over all its lives, and its line to the front end or router.

Owns starting, crashing and restarting. A life is a `SimulatedInstance`; it gets a line when it has started. Behind a router
a life has a second process, its own front end (`InstanceFrontEnd`): the two crash and pause together, but the engine can
also be paused alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from baton.sim.disk import SimulatedDisk
from baton.sim.faults import DiskRates, Fault
from baton.sim.front_end import InstanceTable
from baton.sim.instance import InstanceSpec, InstanceWatcher, SimulatedInstance
from baton.sim.instance_front_end import InstanceFrontEnd, line_names
from baton.sim.law_names import DESERVED_STALL, HANG_SEEN, LawBroken
from baton.sim.lines import LineEndpoint, Lines
from baton.sim.simulated_peers import DataConnections, SimulatedPeers
from baton.sim.storage_copies import StorageCopies, StorageModel
from baton.sim.world import Host, World
from baton.wire.instance_sessions import InstanceSessions, SessionEffects

FRONT = "front"
STARTED_AGAIN_US = 100_000
"""Time until an instance that has ended by itself is started again."""


def instance_name(number: int) -> str:
    return f"instance {number}"


class InstanceHost:
    when_dead: Callable[[InstanceHost], None] | None = None
    """Called when a life has ended."""
    when_opened: Callable[[InstanceHost], None] | None = None
    """Called when the present life has accepted a session."""
    when_told: Callable[[InstanceHost, SessionEffects], None] | None = None
    """Called with the effects of each message from the router."""
    at_step: Callable[[InstanceHost, str], None] | None = None
    """Called at each step of a hand-over that is taken here."""
    stopped_for_good = False
    """Whether its engine is paused until its front end kills it; healing does not end that."""
    stopped_us = 0
    """Since when."""
    clock_ticks = 1
    """By how much its clock is later at each life than at the one before."""
    clock_back_ticks = 0
    """By how much its clock was set back in all."""

    def __init__(
        self,
        world: World,
        lines: Lines,
        spec: InstanceSpec,
        instance_table: InstanceTable | None,
        disk: DiskRates,
        watcher: InstanceWatcher | None = None,
        transfers: DataConnections | None = None,
        peers: Sequence[str] = (),
        grace_us: int = 0,
        storage_model: StorageModel | None = None,
        peers_lines: Lines | None = None,
    ) -> None:
        """`instance_table`: the front end's side of it; None: it serves a router, whose requests it keeps for `grace_us`.

        `peers_lines`: the kind of lines to its peers; None: `lines`.
        """
        self.name = instance_name(spec.number)
        self.role = spec.config.role
        self.peers = peers
        """Names of the instances that it hands over to, or takes over from."""
        self.neighbours: SimulatedPeers | None = None
        """Peer connections of the present life, once it has started."""
        self.peer_lines: list[LineEndpoint] = []
        """Of all lives."""
        self._transfers, self._storage_model = transfers, storage_model
        self.number = spec.number
        self.instance_table = instance_table
        self.front_end: InstanceFrontEnd | None = None
        """The front end of the present life, behind a router."""
        self.instance_sessions: list[InstanceSessions] = []
        """Of all lives."""
        self.host = Host(world, self.name)
        self.front = Host(world, f"front of {spec.number}")
        self._grace_us = grace_us
        self.disk = SimulatedDisk(self.host, disk)
        self.instance: SimulatedInstance | None = None
        """The present life; None while the host is down."""
        self._lines, self._peers_lines = lines, peers_lines or lines
        self._spec = spec
        self._watcher = watcher
        self._troubled_until_us = 0
        self._hurt_until_us = 0
        self._rolled_until_us = 0
        self._rolling = False
        """Whether it is between two lives of a rolling restart."""
        self.line: LineEndpoint | None = None
        """The line of the present life."""
        self.lines: list[LineEndpoint] = []
        """Of all lives."""
        self.disagreement = 0.0
        self.slowness = 1.0

    @property
    def ends(self) -> tuple[str, str]:
        """Names of the two processes of its line: the one that dials, then the one that listens."""
        return line_names(self.number) if self.instance_table is None else (FRONT, self.name)

    def troubled_until_us(self, *, rolling_too: bool) -> int:
        """End of the last fault here that can end a session; now, while one lasts."""
        absent = self.instance is None or self.instance.worker is None
        rolls = self._rolling or (self.instance is not None and self.instance.is_leaving)
        if self.host.paused or (absent and not self._rolling) or (rolls and rolling_too):
            return self.host.world.now_us
        return max(self._troubled_until_us, self.stuck_until_us, self._rolled_until_us if rolling_too else 0)

    def trouble(self, for_us: int = 0, *, of_router: bool = False) -> None:
        """Record a fault here or on the line; `of_router`: at the router, which has no cause to suspect this instance."""
        until_us = self.host.world.now_us + for_us
        self._troubled_until_us = max(self._troubled_until_us, until_us)
        if not of_router:
            self._hurt_until_us = max(self._hurt_until_us, until_us)

    def slow_down(self, for_us: int) -> None:
        """Record slower steps: they end no session, but a router may suspect the instance."""
        self._hurt_until_us = max(self._hurt_until_us, self.host.world.now_us + for_us)

    def hurt_until_us(self) -> int:
        """End of the last fault here for which a router may suspect it; now, while one lasts."""
        absent = self.instance is None or self.instance.worker is None
        late = self.front_end is not None and self.front_end.starved
        stands = (self.host.paused and not late) or self.front.paused
        slow_until_us = 0 if self.instance is None else self.instance.device.slow_until_us
        if absent or stands or self.hangs:
            return self.host.world.now_us
        return max(self._hurt_until_us, slow_until_us, self.stuck_until_us)

    @property
    def stuck_until_us(self) -> int:
        """When it is seen at the latest that an attempt was lost inside this instance; 0: none was."""
        return 0 if self.front_end is None else self.front_end.stuck_until_us

    @property
    def hangs(self) -> bool:
        return self.instance is not None and self.instance.device.hangs

    def boot(self) -> None:
        if not self._rolling:
            self.trouble(of_router=not self.host.lives)  # before its first life the router does not know it
        self.host.restart()
        self.front.restart()
        life = SimulatedInstance(self.host, self.disk, self._spec, self._watcher)
        life.device.disagreement, life.device.slowness = self.disagreement, self.slowness
        life.incarnation = life.incarnation * self.clock_ticks - self.clock_back_ticks
        if self._storage_model is not None and self._spec.config.tiers.host_rows:
            life.storage = StorageCopies(self._storage_model, life)
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
        if self._transfers is not None:
            self._transfers.leave(self.name)
        self.front_end = None
        self.stopped_for_good = False
        for host in (self.host, self.front):
            host.resume()
            host.crash()
            self._lines.process_died(host)
        self.disk.crash()
        self._note("is down")
        if self.when_dead is not None:
            self.when_dead(self)

    def crash_front(self, alone_us: int) -> None:
        """Only its front end crashes; the engine goes on for `alone_us`. The machine is up, and resets its connections."""
        self.trouble(alone_us)
        self.front_end = self.line = None
        self.front.resume()
        self.front.crash()
        self._lines.process_died(self.front, machine_lives=True)
        self._note("has lost its front end")

    def fail(self) -> None:
        """The engine ends by itself, with a failure message."""
        if self.instance is not None and not self.host.paused:
            self.host.world.fire(Fault.ENGINE_FAILURE, self.name)
            self.instance.fail("a simulated fault of the device")
            self.crash()

    def leave(self) -> None:
        """Its operator stops it: it accepts nothing new, and ends when all open requests have ended."""
        if self.front_end is not None:
            self.front.run(self.front_end.leave)

    def restart_when_idle(self, down_us: int) -> None:
        """After a drain: start the next life `down_us` after all open requests have ended."""
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
        self.front.pause()

    def stall(self) -> None:
        """Pause only the engine; its front end continues."""
        self.host.pause()

    def starve(self) -> None:
        """Pause only the engine, as one that waits for a core: no cause to suspect it before its own limit."""
        if self.front_end is not None:
            self.front_end.starved = True
            self.host.pause()

    def resume(self) -> None:
        late = self.front_end is not None and self.front_end.starved
        self.trouble(of_router=late)
        if self.front_end is not None:
            self.front_end.starved = False
        if self.instance is not None:
            self.instance.hindered_us = self.host.world.now_us
        self.front.resume()
        self.host.resume()

    def _serve(self, life: SimulatedInstance) -> None:
        if self._rolling:
            self._rolling = False
            self._rolled_until_us = self.host.world.now_us
            self._hurt_until_us = max(self._hurt_until_us, self.host.world.now_us)
        else:
            self.trouble(of_router=not self.host.lives)
        if self._transfers is not None and self.peers:
            self._meet(life, self._transfers)
        if self.instance_table is None:
            self._join(life)
            return
        self._lines.listen(self.host, self.name, partial(self._accept, life))

    def _accept(self, life: SimulatedInstance, line: LineEndpoint) -> _FrontEndLineOwner:
        """A front end has connected. It is the only one: a connection before it is one that it has given up."""
        if self.line is not None and self.line.session is not None:
            self.line.drop("the front end has opened another connection")
        self.line = line
        return _FrontEndLineOwner(self, life, line)

    def _join(self, life: SimulatedInstance) -> None:
        self.front_end = front_end = InstanceFrontEnd(self.front, self._lines, life, self._grace_us)
        self.line = front_end.line
        self.lines.append(self.line)
        self.instance_sessions.append(front_end.sessions)
        front_end.when_told = self._told
        front_end.when_stalled = self._stalled
        self.front.run(front_end.start)

    def _stalled(self, reason: str) -> None:
        """Its front end kills the engine and ends; whoever supervises it starts it again."""
        life = self.instance
        if life is None or not (self.stopped_for_good or life.device.hangs):
            raise LawBroken(DESERVED_STALL, f"{self.name}: {reason}")
        self.host.world.fire(Fault.ENGINE_STOPPED if self.stopped_for_good else Fault.ENGINE_HANG, self.name)
        self.crash()
        self.host.world.after(STARTED_AGAIN_US, self.boot_if_down)

    def seen_to_hang(self, life: SimulatedInstance, since_us: int, within_us: int) -> None:
        """Law: this life, which hangs since then, has been ended by now; later where its processes stood still meanwhile."""
        if self.instance is not life or (self.stopped_for_good and self.stopped_us > since_us):
            return  # ended; or stopped for good after a step hung, which has a limit of its own from then on
        stands = self.front.paused or (self.host.paused and not self.stopped_for_good)
        if stands or life.hindered_us > since_us:
            now_us = self.host.world.now_us
            self.host.world.after(within_us, self.seen_to_hang, life, now_us, within_us)
            return
        raise LawBroken(HANG_SEEN, f"{self.name} hangs since {since_us}, and still runs {within_us} µs later")

    def _told(self, out: SessionEffects) -> None:
        if self.when_told is not None:
            self.when_told(self, out)

    def _meet(self, life: SimulatedInstance, transfers: DataConnections) -> None:
        self.neighbours = life.peers = SimulatedPeers(life, self._peers_lines, transfers, self.peers)
        self.peer_lines += self.neighbours.lines
        life.device.signals = self.neighbours.sender
        life.at_step = self._step_taken
        if self.instance_table is not None or self.role.gives:  # else the router names the peers to connect to
            self.neighbours.open()

    def _step_taken(self, step: str) -> None:
        if self.at_step is not None:
            self.at_step(self, step)

    def _note(self, what: str) -> None:
        if self.host.world.keeps_notes:
            self.host.world.note(self.name, what)


class _FrontEndLineOwner:
    """Handles the instance's end of a connection of the front end."""

    def __init__(self, node: InstanceHost, life: SimulatedInstance, line: LineEndpoint) -> None:
        self._node = node
        self._life = life
        self._line = line

    def opened(self) -> None:
        self._life.answer(self._line)
        if self._node.when_opened is not None:
            self._node.when_opened(self._node)

    def lost(self, _reason: str) -> None:
        if self._node.line is self._line:
            self._life.front_end_lost()

    def took(self, frames: list[bytes]) -> None:
        if self._node.line is self._line:
            self._life.take(frames)
