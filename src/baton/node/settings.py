"""The settings of an instance: those of its HTTP server, and those sent to its engine process as JSON.

Imports neither a server nor torch: the command line reads these declarations before it knows what to run.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Annotated, Any

import msgspec

from baton.api.metric_names import MetricNames
from baton.api.parsers.choosing import ReasoningParserChoice, ToolParserChoice
from baton.core.config import ROLES, HandoverSettings, SchedulerSettings, TierSettings
from baton.core.engine.progress_watch import STALL_US
from baton.core.setting import BadConfig, Panel, Setting, Unit

DEFAULT_MODEL = "smollm2"
DEFAULT_PEER_PORT = 8100
CPU_KV_BYTES = 2 << 30
STAGING_BYTES = 1 << 30
"""Default host memory of an instance with a store: a staging area for KV on its way to and from the store."""


class ExecutorKind(StrEnum):
    TORCH = "torch"
    SCRIPTED = "scripted"


class LoadFormat(StrEnum):
    """The source of the weights."""

    AUTO = "auto"
    """The model's own files."""
    DUMMY = "dummy"
    """Drawn at random, for a named shape."""


class Dtype(StrEnum):
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT64 = "float64"


class Quantization(StrEnum):
    """The format of weights in memory."""

    AUTO = "auto"
    """A GGUF file's weights as they are, those of safetensors in the number format."""
    NONE = "none"
    INT8 = "int8"
    INT4 = "int4"


class Attention(StrEnum):
    AUTO = "auto"
    NATIVE = "native"
    GATHER = "gather"
    TRITON = "triton"


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


class LogFormat(StrEnum):
    TEXT = "text"
    JSON = "json"


class DeviceChoice(StrEnum):
    """The device the model computes on."""

    AUTO = "auto"
    """CUDA where torch finds such a device."""
    CPU = "cpu"
    CUDA = "cuda"


class ForcedDrafts(StrEnum):
    """Whether tokens that a constraint forces are drafts. `auto`: on a CPU; on CUDA they have not been run on a device."""

    AUTO = "auto"
    ON = "on"
    OFF = "off"


class SpeculateMethod(StrEnum):
    """The method that proposes draft tokens."""

    OFF = "off"
    NAIVE = "naive"
    """No drafts, but every decode is planned and computed as if there were some."""
    NGRAM = "ngram"
    """Drafts from repetitions within the sequence."""


class KvEventsFormat(StrEnum):
    """How a KV event is written."""

    ARRAY = "array"
    """Values by position, as vLLM wrote them until June 2026."""
    MAP = "map"
    """Values by name, as vLLM writes them since then."""


Model = Annotated[
    str,
    Setting(
        "model", Panel.PLAIN,
        "A folder of safetensors, a GGUF file, the built-in name smollm2, or shape:NAME with random weights.",
        is_argument=True,
    ),
]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class RecordSettings:
    """The flight recorder of an engine or a router."""

    flight_recorder: Annotated[
        bool,
        Setting(
            "flight-recorder", Panel.LOG, "Keep the last decisions in memory; write them on a crash, a stall or SIGUSR1."
        ),
    ] = True
    record: Annotated[
        str | None,
        Setting(
            "record", Panel.LOG, "Write all decisions there, for baton replay: a file, or a folder for one a process.",
            metavar="FILE",
        ),
    ] = None  # fmt: skip
    record_folder: Annotated[
        str | None,
        Setting(
            "record-folder", Panel.LOG, "Where the last decisions are written. Default: recordings in Baton's cache folder.",
            metavar="DIR",
        ),
    ] = None  # fmt: skip
    record_tokens: Annotated[
        bool,
        Setting(
            "record-tokens", Panel.LOG, "Real token ids, keys and names in recordings: the text can be read off them.",
            is_flag=True,
        ),
    ] = False  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class KvEventSettings:
    """What routers other than ours are told about the prefix cache."""

    kv_events_endpoint: Annotated[
        str | None,
        Setting(
            "kv-events-endpoint", Panel.EVENTS,
            "Publish which KV blocks come and go, with their tokens, as vLLM does: tcp://127.0.0.1:5557 or ipc://PATH; "
            "port 0 picks a free one. Beyond loopback it needs --trust-network.",
            metavar="ENDPOINT",
        ),
    ] = None  # fmt: skip
    kv_events_replay_endpoint: Annotated[
        str | None,
        Setting(
            "kv-events-replay-endpoint", Panel.EVENTS, "Where readers ask for batches that they missed.", metavar="ENDPOINT"
        ),
    ] = None  # fmt: skip
    kv_events_topic: Annotated[
        str, Setting("kv-events-topic", Panel.EVENTS, "Topic of the batches; llm-d wants kv@POD@MODEL.", is_optional=True)
    ] = ""
    kv_events_format: Annotated[
        KvEventsFormat,
        Setting(
            "kv-events-format", Panel.EVENTS, "An event is an array (vLLM before June 2026) or a map (vLLM since)."
        ),
    ] = KvEventsFormat.ARRAY  # fmt: skip
    kv_events_connect: Annotated[
        bool,
        Setting(
            "kv-events-connect", Panel.EVENTS, "Connect to the endpoint, where the reader listens, instead of listening.",
            is_flag=True,
        ),
    ] = False  # fmt: skip
    kv_events_buffer_steps: Annotated[
        int, Setting("kv-events-buffer-steps", Panel.EVENTS, "Last batches that are kept for replays.", 1)
    ] = 10_000
    kv_events_hwm: Annotated[
        int,
        Setting(
            "kv-events-hwm", Panel.EVENTS, "Batches that a slow reader may have unread; it misses those that follow.", 1
        ),
    ] = 100_000  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class HttpSettings:
    """Settings that instance and router share: the HTTP address and the log."""

    model: Model = DEFAULT_MODEL
    host: Annotated[
        str, Setting("host", Panel.API, "Address to listen on. Another than loopback needs --api-key.")
    ] = "127.0.0.1"  # fmt: skip
    port: Annotated[int, Setting("port", Panel.API, "Port to listen on; 0 picks a free one.", 0, 65535)] = 8000
    api_keys: Annotated[
        tuple[str, ...],
        Setting(
            "api-key", Panel.API,
            "Clients must present it; repeat for tenants. They share no KV, unless given as GROUP:KEY.",
        ),
    ] = ()  # fmt: skip
    metrics_key: Annotated[
        str | None,
        Setting("metrics-key", Panel.API, "Once set, only this key and the admin key read /metrics."),
    ] = field(default=None, repr=False)
    """None: the admin key where there is one, else every API key."""
    metrics_names: Annotated[
        MetricNames,
        Setting(
            "metrics-names", Panel.API,
            "Names at /metrics: our own, those of vLLM where it has the metric too, or both.",
        ),
    ] = MetricNames.BATON  # fmt: skip
    served_model_names: Annotated[
        tuple[str, ...],
        Setting("served-model-name", Panel.API, "Name in the API; repeat for aliases. Default: the model's own."),
    ] = ()
    chat_template: Annotated[
        str | None, Setting("chat-template", Panel.PROMPTS, "A Jinja file instead of the model's own chat template.")
    ] = None
    tool_parser: Annotated[
        ToolParserChoice,
        Setting(
            "tool-parser", Panel.PROMPTS,
            "How the model writes tool calls: auto (told by its chat template), none, hermes, llama3-json, mistral, "
            "pythonic, deepseek, glm or gpt-oss.",
            metavar="FAMILY",
        ),
    ] = ToolParserChoice.AUTO  # fmt: skip
    reasoning_parser: Annotated[
        ReasoningParserChoice,
        Setting(
            "reasoning-parser", Panel.PROMPTS,
            "How the model marks reasoning, which is sent as reasoning_content: auto, none (it is content), think, "
            "gpt-oss.",
            metavar="FAMILY",
        ),
    ] = ReasoningParserChoice.AUTO  # fmt: skip
    generation_config: Annotated[
        str,
        Setting(
            "generation-config", Panel.PROMPTS,
            "Sampling defaults for fields that a request leaves out: auto (the model's generation_config.json), none, or a "
            "JSON file.",
            metavar="auto|none|FILE",
        ),
    ] = "auto"  # fmt: skip
    override_generation_config: Annotated[
        str | None,
        Setting(
            "override-generation-config", Panel.PROMPTS,
            "JSON that overrides them: temperature, top_p, top_k, min_p, repetition_penalty, max_new_tokens.",
            metavar="JSON",
        ),
    ] = None  # fmt: skip
    ssl_certfile: Annotated[
        str | None,
        Setting(
            "ssl-certfile", Panel.TLS,
            "Speak HTTPS with this certificate: PEM, those of its issuers behind it. Read again when it changes.",
            metavar="FILE",
        ),
    ] = None  # fmt: skip
    """None: plain HTTP."""
    ssl_keyfile: Annotated[
        str | None,
        Setting("ssl-keyfile", Panel.TLS, "Its private key, as PEM. Default: in the same file.", metavar="FILE"),
    ] = None
    ssl_keyfile_password_file: Annotated[
        str | None,
        Setting("ssl-keyfile-password-file", Panel.TLS, "A file with the password of that key.", metavar="FILE"),
    ] = None
    max_connections: Annotated[
        int | None,
        Setting(
            "max-connections", Panel.CONNECTIONS,
            "Most connections of clients; idle ones give way. Default: as many as may be open files, up to 16384.", 1,
        ),
    ] = None  # fmt: skip
    max_connections_per_address: Annotated[
        int | None,
        Setting(
            "max-connections-per-address", Panel.CONNECTIONS,
            "Most connections of one address (IPv6: one /64); behind --trusted-proxies, requests at once.", 1,
        ),
    ] = None  # fmt: skip
    trusted_proxies: Annotated[
        tuple[str, ...],
        Setting(
            "trusted-proxies", Panel.CONNECTIONS,
            "Address or network of a proxy whose X-Forwarded-For is believed; repeat for several.",
        ),
    ] = ()  # fmt: skip
    allowed_hosts: Annotated[
        tuple[str, ...],
        Setting(
            "allowed-hosts", Panel.CONNECTIONS,
            "Without --api-key: a name, besides those of loopback, that may be in the Host header; repeatable.",
        ),
    ] = ()  # fmt: skip
    allowed_origins: Annotated[
        tuple[str, ...],
        Setting(
            "allowed-origins", Panel.CONNECTIONS,
            "An origin, such as https://chat.example, whose pages may call from a browser (CORS); repeatable.",
        ),
    ] = ()  # fmt: skip
    special_tokens_in_prompts: Annotated[
        bool,
        Setting(
            "special-tokens-in-prompts", Panel.PROMPTS,
            "The text of a control token in a prompt or /tokenize is that token. In chats a client cannot write one.",
        ),
    ] = True  # fmt: skip
    request_cost_max: Annotated[
        int,
        Setting(
            "max-request-cost", Panel.LIMITS,
            "Most choices × answer tokens × (1 + log-probabilities) of one request, with the prompt tokens that its answer "
            "repeats; beyond it clients get 400.", 1,
        ),
    ] = 2 << 20  # fmt: skip
    key_cost_max: Annotated[
        int,
        Setting("max-key-cost", Panel.LIMITS, "Most of that which one API key has open; beyond it clients get 429.", 1),
    ] = 64 << 20
    key_share: Annotated[
        float,
        Setting(
            "key-share", Panel.LIMITS,
            "With several API keys: the share of the slots that one of them may hold; its other requests wait.", 0.01, 1,
        ),
    ] = 0.75  # fmt: skip
    drain_timeout_s: Annotated[
        float,
        Setting("drain-timeout", Panel.API, "Seconds that open requests get to finish after SIGTERM or Ctrl-C.", 0),
    ] = 30.0
    executor: Annotated[
        ExecutorKind,
        Setting(
            "executor", Panel.MODEL, "scripted needs no model: bytes from a hash, to try the API and for tests.",
            after="max-model-len",
        ),
    ] = ExecutorKind.TORCH  # fmt: skip
    access_log: Annotated[
        bool,
        Setting(
            "access-log", Panel.LOG, "A line for each finished request: its cost, and the engine's state at that moment."
        ),
    ] = True
    log_level: Annotated[
        LogLevel,
        Setting("log-level", Panel.LOG, "info also shows the engine's state, every ten seconds while there is work."),
    ] = LogLevel.INFO
    log_format: Annotated[
        LogFormat, Setting("log-format", Panel.LOG, "text, or json: an object a line, for those who collect logs.")
    ] = LogFormat.TEXT
    otlp_endpoint: Annotated[
        str | None,
        Setting(
            "otlp-endpoint", Panel.LOG, "Send traces to this OpenTelemetry collector (OTLP over HTTP). Extra: otel.",
            metavar="ENDPOINT",
        ),
    ] = None  # fmt: skip
    otlp_sample_ratio: Annotated[
        float,
        Setting(
            "otlp-sample-ratio", Panel.LOG, "Share of the traces kept, of requests that come without traceparent.", 0, 1
        ),
    ] = 1.0

    @property
    def scripted(self) -> bool:
        return self.executor is ExecutorKind.SCRIPTED


@dataclass(frozen=True, kw_only=True)
class AdminSettings:
    admin_key: Annotated[
        str | None,
        Setting(
            "admin-key", Panel.API,
            "Once set, only this key opens the dashboard, and at a router sees and drains instances. It is an API key too.",
            after="api-key",
        ),
    ] = field(default=None, repr=False)  # fmt: skip
    """None: every caller is an operator."""


@dataclass(frozen=True, kw_only=True)
class InstanceSettings(HttpSettings, AdminSettings):
    load_format: Annotated[
        LoadFormat,
        Setting("load-format", Panel.MODEL, "dummy draws weights at random, for shape:qwen3-8b and the like."),
    ] = LoadFormat.AUTO
    cluster_key: Annotated[
        str | None,
        Setting(
            "cluster-key", Panel.PEERS, "What instances prove themselves with; better in the environment or a file.",
            after="peer-port",
        ),
    ] = None  # fmt: skip
    cluster_key_file: Annotated[
        str | None,
        Setting(
            "cluster-key-file", Panel.PEERS, "A file with that key. Default, on loopback: one kept for this user.",
            after="cluster-key",
        ),
    ] = None  # fmt: skip


@dataclass(frozen=True)
class EngineSettings(SchedulerSettings, HandoverSettings, TierSettings, RecordSettings, KvEventSettings):
    endpoint: str
    """The address where the front end listens for the engine."""
    model_folder: str | None
    """None runs the scripted executor, which has no model."""
    prefix_secret: bytes
    log_level: str = LogLevel.INFO
    log_format: LogFormat = LogFormat.TEXT
    cluster_key: bytes = b""
    device: Annotated[
        DeviceChoice, Setting("device", Panel.MODEL, "Where to compute; auto takes cuda where torch sees one.")
    ] = DeviceChoice.AUTO
    dtype: Annotated[Dtype, Setting("dtype", Panel.MODEL, "Number format of weights and KV.")] = Dtype.BFLOAT16
    quantization: Annotated[
        Quantization,
        Setting(
            "quantization", Panel.MODEL,
            "CPU: auto keeps the weights of a GGUF file quantised, none converts them; int8 and int4 quantise safetensors.",
        ),
    ] = Quantization.AUTO  # fmt: skip
    attention: Annotated[
        Attention,
        Setting("attention", Panel.MODEL, "CPU: native (compiled), gather (plain torch). CUDA: triton. Or auto."),
    ] = Attention.AUTO
    batch_invariant: Annotated[
        bool,
        Setting(
            "batch-invariant",
            Panel.MODEL,
            "The same bits whatever else is in the batch. CUDA: slower. CPU: so anyway where possible; refused elsewhere.",
        ),
    ] = False
    threads: Annotated[int | None, Setting("threads", Panel.MODEL, "CPU threads of the model. Default: one a core.", 1)] = (
        None
    )
    context_tokens: Annotated[
        int | None,
        Setting("max-model-len", Panel.MODEL, "Longest sequence, prompt and answer. Default: the model's.", 1),
    ] = None
    step_ms: Annotated[float, Setting("step-ms", Panel.MODEL, "Scripted only: least milliseconds a step.", 0)] = 0.0
    stall_us: Annotated[
        int,
        Setting(
            "stall-timeout", Panel.API,
            "Seconds after which a step that has not ended is a stall; never under 20 × the longest step.", 1,
            unit=Unit.SECONDS, after="drain-timeout",
        ),
    ] = STALL_US  # fmt: skip
    """A stalled engine is killed: `core/engine/progress_watch.py` decides."""
    blocks: Annotated[
        int | None,
        Setting("kv-blocks", Panel.KV, "KV pool in blocks. Default: what --kv-memory holds.", 1, after="block-size"),
    ] = None
    kv_memory_bytes: Annotated[
        int | None,
        Setting(
            "kv-memory", Panel.KV, "KV pool in bytes, such as 512M. Default: 2G; on CUDA what is left there.",
            unit=Unit.BYTES, after="kv-blocks",
        ),
    ] = None  # fmt: skip
    """None: what the largest step leaves of a CUDA device; on a CPU, CPU_KV_BYTES."""
    speculate: Annotated[
        SpeculateMethod,
        Setting(
            "speculate", Panel.DRAFTS,
            "Guess tokens and check them in one step: ngram by repetition; naive guesses none.",
        ),
    ] = SpeculateMethod.OFF  # fmt: skip
    draft_tokens: Annotated[int, Setting("draft-tokens", Panel.DRAFTS, "Most tokens guessed for one decode.", 1)] = 4
    forced_drafts: Annotated[
        ForcedDrafts,
        Setting(
            "forced-drafts", Panel.DRAFTS,
            "Compute several tokens that a constraint forces in one step. auto: on a CPU; on CUDA not yet run on a GPU.",
        ),
    ] = ForcedDrafts.AUTO  # fmt: skip
    ngram_min: Annotated[
        int, Setting("ngram-min", Panel.DRAFTS, "ngram: fewest last tokens that must have come before.", 1)
    ] = 2
    ngram_max: Annotated[int, Setting("ngram-max", Panel.DRAFTS, "ngram: most last tokens that are looked for.", 1)] = 5
    host_memory_bytes: Annotated[
        int | None,
        Setting(
            "host-memory", Panel.TIERS, "For KV that leaves the pool, such as 8G. Default: none; 1G with a store.",
            unit=Unit.BYTES,
        ),
    ] = None  # fmt: skip
    """None: STAGING_BYTES with a store, else nothing."""
    kv_store: Annotated[
        str | None,
        Setting(
            "kv-store", Panel.TIERS, "KV outlives us there: file:DIR, valkey://HOST:PORT/0, mooncake://HOST:PORT.",
            metavar="URL",
        ),
    ] = None  # fmt: skip
    """The address of a store, as `kv.store` reads it."""
    kv_store_limit_bytes: Annotated[
        int | None,
        Setting(
            "kv-store-limit", Panel.TIERS,
            "Most bytes in the store; the least recently used go first. Default of file: 10G.",
            unit=Unit.BYTES,
        ),
    ] = None  # fmt: skip
    role: Annotated[
        RoleName,
        Setting(
            "role", Panel.PEERS,
            "mixed does all; decode takes requests and has its peers prefill them; prefill does that.",
        ),
    ] = RoleName.MIXED  # fmt: skip
    peers: Annotated[
        tuple[str, ...],
        Setting("peer", Panel.PEERS, "HOST:PORT of an instance that prefills for this one; repeat for several."),
    ] = ()
    peer_host: Annotated[
        str,
        Setting(
            "peer-host", Panel.PEERS,
            "Address for peers, to ask for prefill or send KV to. Another than loopback needs a key.",
        ),
    ] = "127.0.0.1"  # fmt: skip
    """The address this instance listens on: for peers if it prefills, for KV if it decodes."""
    peer_port: Annotated[
        int | None,
        Setting("peer-port", Panel.PEERS, "Where prefill is asked for; 0 picks a free one. Default: 8100.", 0, 65535),
    ] = None
    """Port of the listener for peers; 0 picks a free one, None takes DEFAULT_PEER_PORT."""
    transfer: Annotated[
        Transfer,
        Setting("transfer", Panel.PEERS, "How KV travels; auto takes shared memory on one machine, TCP between two."),
    ] = Transfer.AUTO
    trust_network: Annotated[
        bool,
        Setting(
            "trust-network", Panel.PEERS,
            "Allow Mooncake, whose ports have no key (who reaches them reads and writes the KV), and KV events beyond "
            "loopback.",
            is_flag=True,
        ),
    ] = False  # fmt: skip
    router: Annotated[
        str | None,
        Setting("router", Panel.ROUTER, "HOST:PORT where a router lets instances in; beyond loopback it needs a key."),
    ] = None
    """The router's address; None for an instance without one."""
    name: Annotated[
        str,
        Setting(
            "name", Panel.ROUTER,
            "What the router calls this instance, also after a restart. Default: HOST-ROLE-PORT.",
            is_optional=True,
        ),
    ] = ""  # fmt: skip

    @property
    def burst(self) -> int:
        """The most tokens that one decode may yield in one step."""
        return 1 if self.speculate is SpeculateMethod.OFF else 1 + self.draft_tokens

    @property
    def host_bytes(self) -> int:
        if self.host_memory_bytes is not None:
            return self.host_memory_bytes
        return 0 if self.kv_store is None else STAGING_BYTES

    @property
    def has_peers(self) -> bool:
        role = ROLES[self.role]
        return role.takes or role.gives

    @property
    def needs_key(self) -> bool:
        """Whether this instance authenticates others or is authenticated by them."""
        return self.has_peers or self.router is not None


def decode_settings(data: bytes) -> EngineSettings:
    """Decode settings that `msgspec.json.encode` wrote. Raises BadConfig for an unknown field."""
    given = msgspec.json.decode(data, type=dict[str, Any])
    known = {field.name for field in fields(EngineSettings)}
    if unknown := sorted(given.keys() - known):
        raise BadConfig(f"no settings of an engine are called {', '.join(unknown)}")
    return msgspec.convert(given, EngineSettings)
