"""Fault classes and their rates in one world, drawn from the seed.

Owns the list of fault classes and their rates. Injects nothing itself: the network, disks, devices, clients,
`fault_injector` and `router_faults` do, and count each fault under these names. A fuzz report in which one of them is zero
is a failed report.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum


class Fault(StrEnum):
    RESET = "connection reset"
    TRUNCATION = "connection reset in the middle of a write"
    HALF_OPEN = "other end of a connection died and nobody said so"
    STALL = "connection stalled"
    PIECES = "bytes arrived in pieces"
    DELAY = "bytes delayed"
    BIT_FLIP = "bit flipped in a connection"
    REPEATED = "bytes of a connection repeated by somebody in between"
    OMITTED = "bytes of a connection taken out by somebody in between"
    MIRRORED = "bytes of a connection sent back by somebody in between"
    PARTITION = "bytes cut off"
    CONNECT_FAILED = "attempt to connect failed"
    NOT_READING = "connection ended whose other end did not read"
    NO_KEY = "connection of a stranger without the key"
    REPLAY = "recorded connection played again"
    REFLECTION = "bytes sent back to where they came from"
    SAME_NAME = "connection under the name of the listener"
    LINE_FULL = "line full, instance stood still"
    CRASH = "instance crashed"
    ENGINE_FAILURE = "engine failed with last words"
    PAUSE = "instance paused"
    FRONT_PAUSE = "front end paused"
    ROLLING_RESTART = "instance drained and restarted"
    SLOW_DEVICE = "device slowed down"
    DISAGREEMENT = "device disagreed about a row"
    MASK_LATE = "row sat a step out because its mask was late"
    DISK_SLOW = "disk slow"
    DISK_FULL = "disk full"
    DISK_TORN = "write torn"
    DISK_LOST = "write lost in a crash"
    DISK_CORRUPT = "bit flipped on disk"
    DISCONNECT = "client disconnected"
    EARLY_DISCONNECT = "client left before the answer to its submission"
    SLOW_READER = "client read slowly"
    OVERLOAD = "arrivals at up to 4 × the rate"
    NONSENSE = "impossible request"
    KV_BROKEN = "data connection broke"
    KV_REFUSED = "data connection refused"
    KV_FLIPPED = "bit flipped in a piece of KV"
    KV_STALLED = "pieces of KV stalled"
    KV_LOST = "piece of KV lost"
    KV_WHILE_FENCING = "piece of KV landed while it was being fenced"
    KV_TOO_LATE = "piece of KV came after its fence"
    FENCE_SLOW = "fence took long"
    PEER_PARTITION = "peers cut off from each other"
    PEER_ECHO = "message of a peer heard twice"
    STEP_CRASH = "crash at a step of a hand-over"
    STEP_PAUSE = "pause at a step of a hand-over"
    ROUTER_CRASH = "router crashed"
    RESUMED = "client came back for its answer after a router crash"
    ROUTER_PAUSE = "router paused"
    ZOMBIE = "instance came back that was given up"
    OUTLIVED = "old life of an instance came back and was fenced"
    DRAINED = "instance drained by order of the router"
    LEFT = "instance left under load"
    LATE_JOIN = "instance joined under load"
    FRONT_CRASH = "front end of an instance crashed before its engine"
    ENGINE_STALL = "engine stood still while its front end went on"
    ENGINE_STOPPED = "engine stopped for good, and was killed by its front end"
    ENGINE_HANG = "step never ended, and the engine was killed by its front end"
    ENGINE_LATE = "engine late on a busy machine"
    FORGED = "stranger with forged frames"
    FORGED_BY_MEMBER = "forged frame of a member"
    SWALLOWED = "bytes of one direction acknowledged and never delivered"
    ORDER_LOST = "leg lost inside an instance, and never answered"
    OTHER_VERSION = "answer continued under another version of its constraint's backend"
    CLOCK_BACK = "instance started with a clock set back, and joined above its former life"
    LEG_REFUSED = "leg refused by an instance"
    LEG_YIELDED = "leg ended for want of room"
    STORE_SLOW = "store slow"
    STORE_HANGS = "store gave no answer"
    STORE_TOO_LATE = "answer of the store came after its fence"
    STORE_FAILS = "question to the store failed"
    STORE_AWAY = "store out of reach"
    STORE_LEFT_ALONE = "store left alone after failures"
    STORE_DEAD = "store died for good"
    STORE_FULL = "store full"
    STORE_TORN = "object torn"
    STORE_LOST = "object lost"
    STORE_FLIPPED = "bit flipped in an object"
    STORE_SWAPPED = "objects swapped"
    STORE_ALIEN = "object of another model or tenant under our name"
    STORE_BAD = "bad object found when it was fetched, and dropped"
    STORE_WIPED = "store emptied"
    COPY_SLOW = "copy between device and host slow"
    COPY_FAILED = "copy between device and host failed"
    COPY_WHILE_FENCING = "copy ended while it was being fenced"
    HAUL_FENCE_SLOW = "fence of a copy or of the store took long"
    HASTY = "client left while its KV was brought back"


CLASSES: dict[str, tuple[Fault, ...]] = {
    "reset": (Fault.RESET, Fault.TRUNCATION),
    "pieces": (Fault.PIECES,),
    "connect": (Fault.CONNECT_FAILED,),
    "delay": (Fault.DELAY,),
    "bit-flip": (Fault.BIT_FLIP,),
    "tamper": (Fault.REPEATED, Fault.OMITTED, Fault.MIRRORED),
    "partition": (Fault.PARTITION,),
    "stall": (Fault.STALL,),
    "narrow-line": (Fault.LINE_FULL, Fault.NOT_READING),
    "stranger": (Fault.NO_KEY, Fault.REPLAY, Fault.REFLECTION, Fault.SAME_NAME),
    "crash": (Fault.CRASH, Fault.ENGINE_FAILURE, Fault.HALF_OPEN),
    "pause": (Fault.PAUSE, Fault.FRONT_PAUSE),
    "rolling-restart": (Fault.ROLLING_RESTART,),
    "device": (Fault.SLOW_DEVICE, Fault.DISAGREEMENT, Fault.MASK_LATE),
    "disk": (Fault.DISK_SLOW, Fault.DISK_FULL, Fault.DISK_TORN, Fault.DISK_LOST, Fault.DISK_CORRUPT),
    "disconnect": (Fault.DISCONNECT, Fault.EARLY_DISCONNECT),
    "slow-reader": (Fault.SLOW_READER,),
    "overload": (Fault.OVERLOAD,),
    "nonsense": (Fault.NONSENSE,),
    "kv-broken": (Fault.KV_BROKEN,),
    "kv-refused": (Fault.KV_REFUSED,),
    "kv-flip": (Fault.KV_FLIPPED,),
    "kv-stall": (Fault.KV_STALLED, Fault.KV_WHILE_FENCING, Fault.KV_TOO_LATE),
    "kv-loss": (Fault.KV_LOST,),
    "slow-fence": (Fault.FENCE_SLOW,),
    "peer-partition": (Fault.PEER_PARTITION,),
    "echo": (Fault.PEER_ECHO,),
    "step-crash": (Fault.STEP_CRASH,),
    "step-pause": (Fault.STEP_PAUSE,),
    "router-crash": (Fault.ROUTER_CRASH, Fault.RESUMED),
    "router-pause": (Fault.ROUTER_PAUSE,),
    "old-life": (Fault.OUTLIVED,),
    "drain": (Fault.DRAINED, Fault.LEFT),
    "late-join": (Fault.LATE_JOIN,),
    "front-crash": (Fault.FRONT_CRASH,),
    "engine-stall": (Fault.ENGINE_STALL, Fault.ENGINE_STOPPED, Fault.ENGINE_HANG, Fault.ENGINE_LATE, Fault.ZOMBIE),
    "forgery": (Fault.FORGED, Fault.FORGED_BY_MEMBER),
    "crowding": (Fault.LEG_REFUSED, Fault.LEG_YIELDED),
    "one-way": (Fault.SWALLOWED, Fault.ORDER_LOST),
    "clock-back": (Fault.CLOCK_BACK,),
    "version-skew": (Fault.OTHER_VERSION,),
    "copy-slow": (Fault.COPY_SLOW, Fault.COPY_WHILE_FENCING),
    "copy-fails": (Fault.COPY_FAILED,),
    "haul-fence": (Fault.HAUL_FENCE_SLOW,),
    "hasty": (Fault.HASTY,),
    "store-slow": (Fault.STORE_SLOW, Fault.STORE_TOO_LATE),
    "store-hang": (Fault.STORE_HANGS,),
    "store-fails": (Fault.STORE_FAILS,),
    "store-away": (Fault.STORE_AWAY, Fault.STORE_LEFT_ALONE),
    "store-dead": (Fault.STORE_DEAD,),
    "store-full": (Fault.STORE_FULL,),
    "store-torn": (Fault.STORE_TORN, Fault.STORE_BAD),
    "store-loss": (Fault.STORE_LOST,),
    "store-flip": (Fault.STORE_FLIPPED,),
    "store-swap": (Fault.STORE_SWAPPED,),
    "store-alien": (Fault.STORE_ALIEN,),
    "store-wipe": (Fault.STORE_WIPED,),
}
"""By the name used on the command line: the faults that a class injects. A seed draws some of the classes."""

_NAMES = tuple(CLASSES)
OF_PEERS = _NAMES[_NAMES.index("kv-broken") : _NAMES.index("router-crash")]
"""Drawn only for worlds where instances prefill for each other."""
OF_ROUTERS = _NAMES[_NAMES.index("router-crash") : _NAMES.index("copy-slow")]
"""Drawn only for worlds with a router."""
DRAWN_APART = ("one-way", "clock-back", "version-skew")
"""Of those: drawn after all others, each with its own chance, so that what was drawn before stays the same. The chance is a
band in the middle, so that worlds that alone show some bug are left as they were."""
DRAWN_APART_SHARE = 0.15
OF_COPIES = _NAMES[_NAMES.index("copy-slow") : _NAMES.index("store-slow")]
"""Drawn only for worlds where instances have host memory."""
OF_STORES = _NAMES[_NAMES.index("store-slow") :]
"""Drawn only for worlds with a store."""
OF_STORAGE = OF_COPIES + OF_STORES
NOT_ROUTED = ("rolling-restart",)
"""Drawn only for worlds without a router."""

CLASSES_MIN, CLASSES_MAX, PEER_CLASSES_MAX, ROUTER_CLASSES_MAX = 3, 8, 5, 4
STORE_CLASSES_MAX = 5


@dataclass(frozen=True, slots=True)
class NetworkRates:
    """Chance per write where nothing else is said."""

    delay_us: int = 200
    jitter_us: int = 0
    spike: float = 0.0
    spike_us: int = 0
    reset: float = 0.0
    """Half of them cut the write in its middle."""
    pieces: float = 0.0
    bit_flip: float = 0.0
    tamper: float = 0.0
    connect_fails: float = 0.0
    """Chance per attempt to connect."""
    tells: float = 0.0
    """Chance per crash that the other ends of its connections are told at once."""

    @property
    def may_silence(self) -> bool:
        """Whether connections end, or bytes are delayed, often enough for one side to give up the other."""
        return self.reset > 0 or self.bit_flip > 0 or self.tamper > 0 or self.spike > 0 or self.connect_fails > 0


@dataclass(frozen=True, slots=True)
class DiskRates:
    slow: float = 0.0
    full: float = 0.0
    torn: float = 0.0
    lost: float = 0.0
    corrupt: float = 0.0


@dataclass(frozen=True, slots=True)
class KvRates:
    """Chance per hand-over."""

    broken: float = 0.0
    refused: float = 0.0
    flipped: float = 0.0
    stalled: float = 0.0
    lost: float = 0.0
    slow_fence: float = 0.0
    echo: float = 0.0
    """Chance per message between peers."""


@dataclass(frozen=True, slots=True)
class CopyRates:
    """Chance per copy between device and host."""

    slow: float = 0.0
    fails: float = 0.0
    slow_fence: float = 0.0
    """Chance per fence."""
    hasty: float = 0.0
    """Chance per copy to the device that the request's client disconnects about when it ends."""


@dataclass(frozen=True, slots=True)
class StoreRates:
    """Chance per operation of the store; from `torn` on, per object written."""

    slow: float = 0.0
    hangs: float = 0.0
    fails: float = 0.0
    full: float = 0.0
    torn: float = 0.0
    lost: float = 0.0
    flipped: float = 0.0
    swapped: float = 0.0
    alien: float = 0.0


@dataclass(frozen=True, slots=True)
class FaultRates:
    """Rates and counts of all faults in one world. Zero: never."""

    network: NetworkRates
    disk: DiskRates
    kv: KvRates = KvRates()
    copies: CopyRates = CopyRates()
    store: StoreRates = StoreRates()
    store_absences: int = 0
    store_wipes: int = 0
    store_deaths: int = 0
    partitions: int = 0
    peer_partitions: int = 0
    step_crashes: int = 0
    step_pauses: int = 0
    stalls: int = 0
    strangers: int = 0
    crashes: int = 0
    pauses: int = 0
    front_pauses: int = 0
    rolling_restarts: int = 0
    router_crashes: int = 0
    router_pauses: int = 0
    old_lives: int = 0
    drains: int = 0
    late_joins: int = 0
    engine_stalls: int = 0
    engine_hangs: int = 0
    busy_spells: int = 0
    front_crashes: int = 0
    forgeries: int = 0
    swallowings: int = 0
    lost_orders: int = 0
    clock_steps: int = 0
    slow_devices: int = 0
    disagreement: float = 0.0
    """Chance per step."""
    version_skew: int = 0
    """1: every other mixed instance has another version of the backend for constraints; 2: all of them have another one than
    the router, which then cannot tell its masks."""
    late_masks: float = 0.0
    """Chance per mask."""
    disconnect: float = 0.0
    """Chance per request, as are the two below."""
    slow_reader: float = 0.0
    nonsense: float = 0.0
    overload: float = 1.0
    """Factor on the arrival rate."""


def draw_classes(
    stream: random.Random,
    with_peers: bool,
    of_router: random.Random | None = None,
    of_storage: tuple[random.Random, Sequence[str]] | None = None,
) -> tuple[str, ...]:
    """`of_router`: stream for router faults; None: no router. `of_storage`: stream and names of storage faults, or None."""
    usual = tuple(name for name in CLASSES if name not in OF_PEERS + OF_ROUTERS + OF_STORAGE)
    drawn = stream.sample(usual, stream.randint(CLASSES_MIN, CLASSES_MAX))
    of_peers = stream.sample(OF_PEERS, stream.randint(0, PEER_CLASSES_MAX))
    drawn = drawn + of_peers if with_peers else drawn
    if of_router is not None:
        drawn = [name for name in drawn if name not in NOT_ROUTED]
        usual_of_router = [name for name in OF_ROUTERS if name not in DRAWN_APART]
        drawn += of_router.sample(usual_of_router, of_router.randint(1, ROUTER_CLASSES_MAX))
        drawn += [name for name in DRAWN_APART if 0.4 < of_router.random() < 0.4 + DRAWN_APART_SHARE]
    if of_storage is not None:
        drawing, names = of_storage
        drawn += drawing.sample(names, min(len(names), drawing.randint(0, STORE_CLASSES_MAX)))
    return tuple(sorted(drawn))


def log_uniform_us(stream: random.Random, least_us: int, most_us: int) -> int:
    """A duration whose logarithm is uniform: equally likely in 1–10 ms and in 10–100 ms."""
    return int(math.exp(stream.uniform(math.log(least_us), math.log(most_us))))


def flip_bit(data: bytes, bit: int) -> bytes:
    flipped = bytearray(data)
    flipped[bit // 8] ^= 1 << (bit % 8)
    return bytes(flipped)


def draw_rates(stream_of: dict[str, random.Random], classes: Collection[str]) -> FaultRates:
    """Draw with one stream per class, so that a class left out does not change the others."""

    def rate(name: str, least: float, most: float) -> float:
        return stream_of[name].uniform(least, most) if name in classes else 0.0

    def times(name: str, most: int) -> int:
        return stream_of[name].randint(1, most) if name in classes else 0

    return FaultRates(
        network=_draw_network(rate),
        disk=DiskRates(*(rate("disk", 0.1, 0.6) for _ in range(5))),
        kv=_draw_kv(rate),
        copies=_draw_copies(rate),
        store=_draw_store(rate),
        store_absences=times("store-away", 3),
        store_wipes=times("store-wipe", 2),
        store_deaths=times("store-dead", 1),
        peer_partitions=times("peer-partition", 3),
        step_crashes=times("step-crash", 3),
        step_pauses=times("step-pause", 3),
        partitions=times("partition", 3),
        stalls=times("stall", 4),
        strangers=times("stranger", 6),
        crashes=times("crash", 4),
        pauses=times("pause", 3),
        front_pauses=times("pause", 2) - 1 if "pause" in classes else 0,
        rolling_restarts=times("rolling-restart", 2),
        router_crashes=times("router-crash", 2),
        router_pauses=times("router-pause", 2),
        old_lives=times("old-life", 2),
        drains=times("drain", 3),
        late_joins=times("late-join", 1),
        engine_stalls=times("engine-stall", 2),
        engine_hangs=times("engine-stall", 2),
        busy_spells=times("engine-stall", 2),
        front_crashes=times("front-crash", 2),
        forgeries=times("forgery", 4),
        swallowings=times("one-way", 2),
        lost_orders=times("one-way", 2),
        clock_steps=times("clock-back", 2),
        version_skew=times("version-skew", 2),
        slow_devices=times("device", 3),
        disagreement=rate("device", 0.0, 0.03),
        late_masks=rate("device", 0.0, 0.5),
        disconnect=rate("disconnect", 0.05, 0.4),
        slow_reader=rate("slow-reader", 0.1, 0.6),
        nonsense=rate("nonsense", 0.03, 0.2),
        overload=max(1.0, rate("overload", 1.5, 4.0)),
    )


Rate = Callable[[str, float, float], float]


def _draw_network(rate: Rate) -> NetworkRates:
    return NetworkRates(
        delay_us=200,
        jitter_us=int(rate("delay", 100, 3_000)),
        spike=rate("delay", 0.005, 0.05),
        spike_us=int(rate("delay", 10_000, 300_000)),
        tells=rate("reset", 0.3, 1.0),
        reset=rate("reset", 0.0, 0.02),
        pieces=rate("pieces", 0.02, 0.5),
        bit_flip=rate("bit-flip", 0.001, 0.02),
        tamper=rate("tamper", 0.001, 0.02),
        connect_fails=rate("connect", 0.05, 0.5),
    )


def _draw_kv(rate: Rate) -> KvRates:
    return KvRates(
        broken=rate("kv-broken", 0.01, 0.12),
        refused=rate("kv-refused", 0.01, 0.2),
        flipped=rate("kv-flip", 0.02, 0.3),
        stalled=rate("kv-stall", 0.05, 0.5),
        lost=rate("kv-loss", 0.01, 0.2),
        slow_fence=rate("slow-fence", 0.05, 0.6),
        echo=rate("echo", 0.02, 0.3),
    )


def _draw_copies(rate: Rate) -> CopyRates:
    return CopyRates(
        slow=rate("copy-slow", 0.05, 0.5),
        fails=rate("copy-fails", 0.02, 0.3),
        slow_fence=rate("haul-fence", 0.1, 0.7),
        hasty=rate("hasty", 0.6, 1.0),
    )


def _draw_store(rate: Rate) -> StoreRates:
    return StoreRates(
        slow=rate("store-slow", 0.05, 0.6),
        hangs=rate("store-hang", 0.02, 0.3),
        fails=rate("store-fails", 0.05, 0.4),
        full=rate("store-full", 0.05, 0.6),
        torn=rate("store-torn", 0.02, 0.3),
        lost=rate("store-loss", 0.02, 0.4),
        flipped=rate("store-flip", 0.02, 0.3),
        swapped=rate("store-swap", 0.02, 0.3),
        alien=rate("store-alien", 0.02, 0.3),
    )
