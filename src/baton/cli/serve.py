"""`baton serve`: options in, one ServeSettings out, and where the log goes.

Every option can also be set as BATON_<NAME> in the environment, or in a TOML file given with --config.
"""

from __future__ import annotations

import logging
import re
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from baton.cli.options import config_file, option, switch, variable
from baton.core.config import BringBack, OnPreempt, PrefillPath, ReservePolicy, VictimPolicy
from baton.core.errors import BatonError
from baton.node.models import LoadFormat
from baton.node.settings import EngineSettings, OnDevice, Speculate

console = Console(stderr=True, highlight=False)

API, MODEL, KV, PRESSURE, LOG = "API", "Model", "KV cache and scheduling", "Under KV pressure", "Log"
DRAFTS = "Speculative decoding"
TIERS = "KV beyond the pool"
PEERS = "Prefill here, decode there"
ROUTER = "Under a router"

SIZE = "SIZE"

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


class ExecutorKind(StrEnum):
    TORCH = "torch"
    SCRIPTED = "scripted"


class Dtype(StrEnum):
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT64 = "float64"


class Attention(StrEnum):
    AUTO = "auto"
    NATIVE = "native"
    GATHER = "gather"
    TRITON = "triton"
    FLASHINFER = "flashinfer"


class RoleName(StrEnum):
    MIXED = "mixed"
    PREFILL = "prefill"
    DECODE = "decode"


class Transfer(StrEnum):
    AUTO = "auto"
    SHM = "shm"
    TCP = "tcp"
    MOONCAKE = "mooncake"


class LogLevel(StrEnum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


_MODEL_HELP = "A folder of safetensors, a GGUF file, the built-in name smollm2, or shape:NAME with random weights."
Model = Annotated[str, typer.Argument(help=_MODEL_HELP, envvar=variable("model"), show_envvar=False)]
Host = Annotated[str, option("host", API, "Address to listen on. Another than loopback needs --api-key.")]
Port = Annotated[int, option("port", API, "Port to listen on; 0 picks a free one.", 0, 65535)]
ApiKeys = Annotated[
    list[str] | None,
    option("api-key", API, "Clients must present it; repeat for tenants. They share no KV, unless given as GROUP:KEY."),
]
Names = Annotated[
    list[str] | None, option("served-model-name", API, "Name in the API; repeat for aliases. Default: the model's own.")
]
MaxWaiting = Annotated[int, option("max-waiting", API, "Longest queue; beyond it clients get 429 with Retry-After.", 1)]
Template = Annotated[str | None, option("chat-template", API, "A Jinja file instead of the model's own chat template.")]
DrainTimeout = Annotated[
    float, option("drain-timeout", API, "Seconds that open requests get to finish after SIGTERM or Ctrl-C.", 0)
]
DtypeOption = Annotated[Dtype, option("dtype", MODEL, "Number format of weights and KV.")]
LoadFormatOption = Annotated[
    LoadFormat, option("load-format", MODEL, "dummy draws weights at random, for shape:qwen3-8b and the like.", metavar=" ")
]
DeviceOption = Annotated[OnDevice, option("device", MODEL, "Where to compute; auto takes cuda where torch sees one.")]
AttentionOption = Annotated[
    Attention,
    option("attention", MODEL, "CPU: native (compiled), gather (plain torch). CUDA: triton. Or auto.", metavar=" "),
]
BatchInvariant = Annotated[
    bool, switch("batch-invariant", MODEL, "CUDA: the same bits whatever else is in the batch. Slower.")
]
Threads = Annotated[int | None, option("threads", MODEL, "CPU threads of the model. Default: one a core.", 1)]
MaxModelLen = Annotated[
    int | None, option("max-model-len", MODEL, "Longest sequence, prompt and answer. Default: the model's.", 1)
]
Executor = Annotated[
    ExecutorKind, option("executor", MODEL, "scripted needs no model: bytes from a hash, to try the API and for tests.")
]
StepMs = Annotated[float, option("step-ms", MODEL, "Scripted only: least milliseconds a step.", 0)]
MaxNumSeqs = Annotated[int, option("max-num-seqs", KV, "Most requests that run at once.", 1)]
MaxBatched = Annotated[
    int, option("max-num-batched-tokens", KV, "Most tokens one step may feed; longer prompts are cut into chunks.", 1)
]
BlockSize = Annotated[int, option("block-size", KV, "Token positions a KV block.", 1)]
KvBlocks = Annotated[int | None, option("kv-blocks", KV, "KV pool in blocks. Default: what --kv-memory holds.", 1)]
KvMemory = Annotated[
    str | None,
    option("kv-memory", KV, "KV pool in bytes, such as 512M. Default: 2G; on CUDA what is left there.", metavar=SIZE),
]
PrefixCache = Annotated[bool, switch("prefix-cache", KV, "Reuse the KV of prompts that begin alike.")]
PlanAhead = Annotated[int, option("plan-ahead", KV, "Steps in flight: 2 plans one while another computes.", 1, 3)]
SpeculateOption = Annotated[
    Speculate,
    option("speculate", DRAFTS, "Guess tokens and check them in one step: ngram by repetition; naive guesses none."),
]
DraftTokens = Annotated[int, option("draft-tokens", DRAFTS, "Most tokens guessed for one decode.", 1)]
NgramMin = Annotated[int, option("ngram-min", DRAFTS, "ngram: fewest last tokens that must have come before.", 1)]
NgramMax = Annotated[int, option("ngram-max", DRAFTS, "ngram: most last tokens that are looked for.", 1)]
Reserve = Annotated[
    ReservePolicy,
    option("reserve", PRESSURE, "What running requests keep free to grow into. More: fewer preemptions, smaller batches."),
]
RatioInitial = Annotated[
    float, option("ratio-initial", PRESSURE, "new-token-ratio: share of the remaining outputs reserved at the start.", 0, 1)
]
RatioDecay = Annotated[float, option("ratio-decay", PRESSURE, "new-token-ratio: what the share falls by a pass.", 0)]
RatioFloor = Annotated[float, option("ratio-floor", PRESSURE, "new-token-ratio: the least share.", 0, 1)]
RatioClip = Annotated[
    int, option("ratio-clip-tokens", PRESSURE, "new-token-ratio: remaining tokens beyond this are not reserved for.", 0)
]
FixedBlocks = Annotated[
    int, option("fixed-blocks", PRESSURE, "fixed-blocks: blocks a running request reserves after a preemption.", 0)
]
FixedBlocksDecay = Annotated[
    float, option("fixed-blocks-decay", PRESSURE, "fixed-blocks: what those fall by a pass, down to 0.", 0)
]
Victims = Annotated[
    VictimPolicy, option("victims", PRESSURE, "Who yields: the newest, or the one that is cheapest to compute again.")
]
MaxPreemptions = Annotated[
    int, option("max-preemptions", PRESSURE, "A request that yielded this often is no longer a victim.", 0)
]
HostMemoryOption = Annotated[
    str | None,
    option("host-memory", TIERS, "For KV that leaves the pool, such as 8G. Default: none; 1G with a store.", metavar=SIZE),
]
KvStore = Annotated[
    str | None,
    option("kv-store", TIERS, "KV outlives us there: file:DIR, valkey://HOST:PORT/0, mooncake://HOST:PORT.", metavar="URL"),
]
KvStoreLimit = Annotated[
    str | None,
    option("kv-store-limit", TIERS, "Most bytes in the store, such as 20G; the least recently used go first.", metavar=SIZE),
]
SavePreempted = Annotated[
    bool, switch("save-preempted", TIERS, "Keep the KV of requests that yield, to go on from here or elsewhere.")
]
SaveFinished = Annotated[
    bool, switch("save-finished", TIERS, "Keep the KV of requests that end, for others that begin alike.")
]
CacheOutputs = Annotated[bool, switch("cache-outputs", TIERS, "Keep the KV of generated tokens too, not only of prompts.")]
BringBackOption = Annotated[
    BringBack,
    option("bring-back", TIERS, "Fetch KV when that is quicker than computing it (cheapest), or always.", metavar=" "),
]
RoleOption = Annotated[
    RoleName,
    option("role", PEERS, "mixed does all; decode takes requests and has its peers prefill them; prefill does that."),
]
PeerList = Annotated[
    list[str] | None,
    option("peer", PEERS, "HOST:PORT of an instance that prefills for this one; repeat for several."),
]
PeerHost = Annotated[
    str,
    option("peer-host", PEERS, "Address for peers, to ask for prefill or send KV to. Another than loopback needs a key."),
]
PeerPort = Annotated[
    int | None, option("peer-port", PEERS, "Where prefill is asked for; 0 picks a free one. Default: 8100.", 0, 65535)
]
ClusterKey = Annotated[
    str | None, option("cluster-key", PEERS, "What instances prove themselves with; better in the environment or a file.")
]
ClusterKeyFile = Annotated[
    str | None, option("cluster-key-file", PEERS, "A file with that key. Default, on loopback: one kept for this user.")
]
TransferOption = Annotated[
    Transfer, option("transfer", PEERS, "How KV travels; auto takes shared memory on one machine, TCP between two.")
]
OnPreemptOption = Annotated[
    OnPreempt | None,
    option(
        "on-preempt",
        PRESSURE,
        "What it cannot hold: resume here later, or end with pd_reschedule to go on elsewhere. "
        "Default: reschedule under a router, else resume.",
    ),
]
RouterAddress = Annotated[
    str | None, option("router", ROUTER, "HOST:PORT where a router lets instances in; beyond loopback it needs a key.")
]
InstanceName = Annotated[
    str | None, option("name", ROUTER, "What the router calls this instance, also after a restart. Default: HOST-ROLE-PORT.")
]
PrefillPathOption = Annotated[
    PrefillPath, option("prefill-path", PEERS, "How prefill plans its steps: short, or general as other instances do.")
]
PrefillTimeout = Annotated[float, option("prefill-timeout", PEERS, "Seconds that decode waits for a peer's prefill.", 0.1)]
Lease = Annotated[float, option("lease", PEERS, "Seconds that blocks wait for a peer of which nothing is heard.", 0.1)]
AccessLog = Annotated[
    bool, switch("access-log", LOG, "A line for each finished request: its cost, and the engine's state at that moment.")
]
LogLevelOption = Annotated[
    LogLevel, option("log-level", LOG, "info also shows the engine's state, once a second while there is work.")
]
Config = Annotated[Path | None, config_file(lambda: serve)]


def parse_bytes(text: str, hint: str = "--kv-memory") -> int:
    """`2G`, `512MiB`, `1.5g` or a plain number of bytes."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if match is None:
        raise typer.BadParameter(f"{text!r} is not a size; write for example 512M or 2G", param_hint=hint)
    return int(float(match[1]) * _UNITS[match[2].upper()])


def bytes_if_given(text: str | None, hint: str) -> int | None:
    return None if text is None else parse_bytes(text, hint)


def serve(
    model: Model = "smollm2",
    host: Host = "127.0.0.1", port: Port = 8000, api_key: ApiKeys = None, served_model_name: Names = None,
    max_waiting: MaxWaiting = 1024, chat_template: Template = None, drain_timeout: DrainTimeout = 30.0,
    load_format: LoadFormatOption = LoadFormat.AUTO, device: DeviceOption = OnDevice.AUTO,
    dtype: DtypeOption = Dtype.BFLOAT16, attention: AttentionOption = Attention.AUTO,
    batch_invariant: BatchInvariant = False, threads: Threads = None, max_model_len: MaxModelLen = None,
    executor: Executor = ExecutorKind.TORCH, step_ms: StepMs = 0.0,
    max_num_seqs: MaxNumSeqs = 64, max_num_batched_tokens: MaxBatched = 2048, block_size: BlockSize = 16,
    kv_blocks: KvBlocks = None, kv_memory: KvMemory = None,
    prefix_cache: PrefixCache = True, plan_ahead: PlanAhead = 2, speculate: SpeculateOption = Speculate.OFF,
    draft_tokens: DraftTokens = 4, ngram_min: NgramMin = 2, ngram_max: NgramMax = 5,
    reserve: Reserve = ReservePolicy.NEW_TOKEN_RATIO,
    ratio_initial: RatioInitial = 0.7, ratio_decay: RatioDecay = 0.001, ratio_floor: RatioFloor = 0.1,
    ratio_clip_tokens: RatioClip = 4096,
    fixed_blocks: FixedBlocks = 16, fixed_blocks_decay: FixedBlocksDecay = 0.025,
    victims: Victims = VictimPolicy.NEWEST, max_preemptions: MaxPreemptions = 8,
    host_memory: HostMemoryOption = None, kv_store: KvStore = None, kv_store_limit: KvStoreLimit = None,
    save_preempted: SavePreempted = True, save_finished: SaveFinished = True, cache_outputs: CacheOutputs = True,
    bring_back: BringBackOption = BringBack.CHEAPEST,
    role: RoleOption = RoleName.MIXED, peer: PeerList = None, peer_host: PeerHost = "127.0.0.1", peer_port: PeerPort = None,
    cluster_key: ClusterKey = None, cluster_key_file: ClusterKeyFile = None, transfer: TransferOption = Transfer.AUTO,
    on_preempt: OnPreemptOption = None, prefill_path: PrefillPathOption = PrefillPath.SHORT,
    prefill_timeout: PrefillTimeout = 60.0, lease: Lease = 2.0, router: RouterAddress = None, name: InstanceName = None,
    access_log: AccessLog = True, log_level: LogLevelOption = LogLevel.INFO,
    config: Config = None,  # noqa: ARG001  its callback has made it the defaults of all the others
) -> None:  # fmt: skip
    """Serve a model behind an OpenAI-compatible API.

    [dim]baton serve[/dim] serves the built-in SmolLM2-135M at http://127.0.0.1:8000;
    [dim]baton serve ./my-model --port 9000[/dim] a folder of safetensors;
    [dim]baton serve model.gguf --dtype float32[/dim] a GGUF file, converted once.

    Each option can also be set in the environment (--max-num-seqs as BATON_MAX_NUM_SEQS) or in a TOML file given with
    --config (max-num-seqs = 64); a flag goes before the environment, that before the file.
    """
    engine = EngineSettings(
        endpoint="", model_folder=None, prefix_secret=b"", device=device, dtype=dtype, attention=attention,
        batch_invariant=batch_invariant, threads=threads, log_level=log_level, slots=max_num_seqs, block_size=block_size,
        blocks=kv_blocks, kv_memory_bytes=bytes_if_given(kv_memory, "--kv-memory"), context_tokens=max_model_len,
        step_tokens=max_num_batched_tokens, depth=plan_ahead, waiting_max=max_waiting,
        speculate=speculate, draft_tokens=draft_tokens, ngram_min=ngram_min, ngram_max=ngram_max,
        prefix_cache=prefix_cache, step_ms=step_ms, reserve=reserve, ratio_initial=ratio_initial, ratio_decay=ratio_decay,
        ratio_floor=ratio_floor, ratio_clip_tokens=ratio_clip_tokens, fixed_blocks=fixed_blocks,
        fixed_blocks_decay=fixed_blocks_decay, victims=victims, max_preemptions=max_preemptions, role=role,
        peers=tuple(peer or ()), peer_host=peer_host, peer_port=peer_port, transfer=transfer,
        on_preempt=on_preempt or (OnPreempt.RESUME if router is None else OnPreempt.RESCHEDULE),
        prefill_path=prefill_path, prefill_timeout_s=prefill_timeout, lease_s=lease, router=router, name=name or "",
        host_memory_bytes=bytes_if_given(host_memory, "--host-memory"), kv_store=kv_store or None,
        kv_store_limit_bytes=bytes_if_given(kv_store_limit, "--kv-store-limit"), save_preempted=save_preempted,
        save_finished=save_finished, cache_outputs=cache_outputs, bring_back=bring_back,
    )  # fmt: skip
    scripted = executor is ExecutorKind.SCRIPTED
    _run(
        model="scripted" if scripted else model, host=host, port=port, api_keys=tuple(api_key or ()),
        served_model_names=tuple(served_model_name or ()), chat_template=chat_template, drain_timeout_s=drain_timeout,
        scripted=scripted, cluster_key=cluster_key, cluster_key_file=cluster_key_file, engine=engine,
        log_level=log_level, access_log=access_log, load_format=load_format,
    )  # fmt: skip


def log_to_stderr(level: LogLevel, access_log: bool) -> None:
    """Everything of ours that is loud enough, a line each, on standard error; nothing of other libraries."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
    ours = logging.getLogger("baton")
    ours.handlers[:] = [handler]
    ours.propagate = False
    ours.setLevel(level.upper())
    logging.getLogger("baton.access").setLevel(logging.NOTSET if access_log else logging.WARNING)


def _run(log_level: LogLevel, access_log: bool, **settings: Any) -> None:
    # Imported late: `baton --help` must not wait for the libraries of a server.
    from baton.node import service

    log_to_stderr(log_level, access_log)
    try:
        service.serve(
            service.ServeSettings(**settings), lambda line: console.print(line, style="dim", markup=False, soft_wrap=True)
        )
    except BatonError as error:
        console.print(f"baton serve: {error}", style="red", markup=False, soft_wrap=True)
        raise typer.Exit(1) from None
