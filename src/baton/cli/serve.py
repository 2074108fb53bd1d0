"""`baton serve`: options in, one ServeSettings out. Every option can also be set as BATON_<NAME> in the environment."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Annotated, Any

import typer
from rich.console import Console

from baton.core.errors import BatonError
from baton.node.settings import EngineSettings

console = Console(stderr=True, highlight=False)

API, MODEL, KV = "API", "Model", "KV cache and scheduling"

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


def _option(name: str, panel: str, text: str, least: float | None = None, most: float | None = None) -> Any:
    variable = _variable(name)
    return typer.Option(
        f"--{name}", help=text, envvar=variable, show_envvar=False, rich_help_panel=panel, min=least, max=most
    )


def _variable(name: str) -> str:
    return "BATON_" + name.upper().replace("-", "_")


_MODEL_HELP = "A folder of safetensors, a GGUF file, or the built-in name smollm2."
Model = Annotated[str, typer.Argument(help=_MODEL_HELP, envvar=_variable("model"), show_envvar=False)]
Host = Annotated[str, _option("host", API, "Address to listen on. Another than loopback needs --api-key.")]
Port = Annotated[int, _option("port", API, "Port to listen on; 0 picks a free one.", 0, 65535)]
ApiKeys = Annotated[
    list[str] | None,
    _option("api-key", API, "A key that clients must present; repeat for several tenants, which share no KV."),
]
Names = Annotated[
    list[str] | None, _option("served-model-name", API, "Name in the API; repeat for aliases. Default: the model's own.")
]
MaxWaiting = Annotated[int, _option("max-waiting", API, "Longest queue; beyond it clients get 429 with Retry-After.", 1)]
Template = Annotated[str | None, _option("chat-template", API, "A Jinja file instead of the model's own chat template.")]
DrainTimeout = Annotated[
    float, _option("drain-timeout", API, "Seconds that open requests get to finish after SIGTERM or Ctrl-C.", 0)
]
DtypeOption = Annotated[Dtype, _option("dtype", MODEL, "Number format of weights and KV.")]
AttentionOption = Annotated[
    Attention, _option("attention", MODEL, "native is a compiled kernel, gather plain torch; auto takes native if it can.")
]
Threads = Annotated[int | None, _option("threads", MODEL, "CPU threads of the model. Default: one a core.", 1)]
MaxModelLen = Annotated[
    int | None, _option("max-model-len", MODEL, "Longest sequence, prompt and answer. Default: the model's.", 1)
]
Executor = Annotated[
    ExecutorKind, _option("executor", MODEL, "scripted needs no model: bytes from a hash, to try the API and for tests.")
]
StepMs = Annotated[float, _option("step-ms", MODEL, "Scripted only: least milliseconds a step.", 0)]
MaxNumSeqs = Annotated[int, _option("max-num-seqs", KV, "Most requests that run at once.", 1)]
MaxBatched = Annotated[
    int, _option("max-num-batched-tokens", KV, "Most tokens one step may feed; longer prompts are cut into chunks.", 1)
]
BlockSize = Annotated[int, _option("block-size", KV, "Token positions a KV block.", 1)]
KvBlocks = Annotated[int | None, _option("kv-blocks", KV, "KV pool in blocks. Default: what --kv-memory holds.", 1)]
KvMemory = Annotated[str, _option("kv-memory", KV, "KV pool in bytes, such as 512M or 2G.")]
PrefixCache = Annotated[
    bool,
    typer.Option(
        "--prefix-cache/--no-prefix-cache",
        help="Reuse the KV of prompts that begin alike.",
        envvar=_variable("prefix-cache"),
        show_envvar=False,
        rich_help_panel=KV,
    ),
]
PlanAhead = Annotated[int, _option("plan-ahead", KV, "Steps in flight: 2 plans one while another computes.", 1, 3)]


def parse_bytes(text: str) -> int:
    """`2G`, `512MiB`, `1.5g` or a plain number of bytes."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if match is None:
        raise typer.BadParameter(f"{text!r} is not a size; write for example 512M or 2G", param_hint="--kv-memory")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def serve(
    model: Model = "smollm2",
    host: Host = "127.0.0.1",
    port: Port = 8000,
    api_key: ApiKeys = None,
    served_model_name: Names = None,
    max_waiting: MaxWaiting = 1024,
    chat_template: Template = None,
    drain_timeout: DrainTimeout = 30.0,
    dtype: DtypeOption = Dtype.BFLOAT16,
    attention: AttentionOption = Attention.AUTO,
    threads: Threads = None,
    max_model_len: MaxModelLen = None,
    executor: Executor = ExecutorKind.TORCH,
    step_ms: StepMs = 0.0,
    max_num_seqs: MaxNumSeqs = 64,
    max_num_batched_tokens: MaxBatched = 2048,
    block_size: BlockSize = 16,
    kv_blocks: KvBlocks = None,
    kv_memory: KvMemory = "2G",
    prefix_cache: PrefixCache = True,
    plan_ahead: PlanAhead = 2,
) -> None:
    """Serve a model behind an OpenAI-compatible API.

    [dim]baton serve[/dim] serves the built-in SmolLM2-135M at http://127.0.0.1:8000;
    [dim]baton serve ./my-model --port 9000[/dim] a folder of safetensors;
    [dim]baton serve model.gguf --dtype float32[/dim] a GGUF file, converted once.

    Each option can also be set in the environment: --max-num-seqs as BATON_MAX_NUM_SEQS, and so on.
    """
    engine = EngineSettings(
        endpoint="", model_folder=None, prefix_secret=b"", dtype=dtype, attention=attention, threads=threads,
        slots=max_num_seqs, block_size=block_size, blocks=kv_blocks, kv_memory_bytes=parse_bytes(kv_memory),
        context_tokens=max_model_len, step_tokens=max_num_batched_tokens, depth=plan_ahead, waiting_max=max_waiting,
        prefix_cache=prefix_cache, step_ms=step_ms,
    )  # fmt: skip
    scripted = executor is ExecutorKind.SCRIPTED
    _run(
        model="scripted" if scripted else model, host=host, port=port, api_keys=tuple(api_key or ()),
        served_model_names=tuple(served_model_name or ()), chat_template=chat_template, drain_timeout_s=drain_timeout,
        scripted=scripted, engine=engine,
    )  # fmt: skip


def _run(**settings: Any) -> None:
    # Imported late: `baton --help` must not wait for the libraries of a server.
    from baton.node import service

    try:
        service.serve(
            service.ServeSettings(**settings), lambda line: console.print(line, style="dim", markup=False, soft_wrap=True)
        )
    except BatonError as error:
        console.print(f"baton serve: {error}", style="red", markup=False, soft_wrap=True)
        raise typer.Exit(1) from None
