"""`baton router`: options in, one RouterSettings out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from baton.cli.options import config_file, option, switch
from baton.cli.serve import (
    API,
    AccessLog,
    ApiKeys,
    DrainTimeout,
    Executor,
    ExecutorKind,
    Host,
    LogLevel,
    LogLevelOption,
    Model,
    Names,
    Port,
    Template,
    console,
    log_to_stderr,
)
from baton.core.errors import BatonError
from baton.core.routing.events import Policy, RouterConfig

INSTANCES, CARRYING, LIMITS = "Instances", "Carrying requests", "Limits"

STOPPING_S = 2.0
"""What an instance has open is moved so long before its own drain ends, for that would be a loss."""

AdminKey = Annotated[
    str | None,
    option(
        "admin-key", API, "Once set, only this key sees and drains instances and opens the dashboard. It is an API key too."
    ),
]
JoinHost = Annotated[
    str, option("join-host", INSTANCES, "Address where instances join. Another than loopback needs a cluster key.")
]
JoinPort = Annotated[int, option("join-port", INSTANCES, "Port where instances join; 0 picks a free one.", 0, 65535)]
ClusterKey = Annotated[
    str | None,
    option("cluster-key", INSTANCES, "What instances prove themselves with; better in the environment or a file."),
]
ClusterKeyFile = Annotated[
    str | None, option("cluster-key-file", INSTANCES, "A file with that key. Default, on loopback: one kept for this user.")
]
PolicyOption = Annotated[
    Policy,
    option(
        "policy", INSTANCES,
        "Who gets a request: cache-aware (weighs the prefix that an instance has against its load), power-of-two, "
        "round-robin or random.",
        metavar="POLICY",
    ),
]  # fmt: skip
SuspectAfter = Annotated[
    float, option("suspect-after", INSTANCES, "Seconds without a sign of life after which an instance is taken out.", 0.4)
]
OrphanGrace = Annotated[
    float,
    option(
        "orphan-grace", INSTANCES, "Seconds that instances keep requests after this router was lost, to be resumed.", 0.1
    ),
]
RetryCount = Annotated[
    int,
    option("preempt-retry-count", CARRYING, "How often a request may move because an instance had no room for it.", 0),
]
RetryExclude = Annotated[
    bool,
    switch("preempt-retry-exclude-decode", CARRYING, "It then avoids that instance while there is another."),
]
LossCount = Annotated[
    int, option("loss-retry-count", CARRYING, "How often a request may move because its instance was lost.", 0)
]
FruitlessCount = Annotated[
    int,
    option("fruitless-loss-count", CARRYING, "It ends at so many losses in a row without a token: it may cause them.", 1),
]
RequestTimeout = Annotated[
    float,
    option(
        "request-timeout", CARRYING,
        "Seconds after which a request is neither placed nor moved any more; an answer that flows goes on.", 1,
    ),
]  # fmt: skip
AbsentTimeout = Annotated[
    float, option("absent-timeout", CARRYING, "Seconds that a new request waits while no instance is there.", 0)
]
MaxWaiting = Annotated[
    int, option("max-waiting", LIMITS, "Choices that may wait for a place; beyond it clients get 429 with Retry-After.", 1)
]
KeyConcurrency = Annotated[
    int | None, option("key-concurrency", LIMITS, "Choices that one API key may have open. Default: any number.", 1)
]
KeyTokens = Annotated[
    int | None,
    option("key-tokens-per-minute", LIMITS, "Tokens, prompt and answer, that one API key may use. Default: any number.", 1),
]
Demo = Annotated[bool, typer.Option("--demo", help="Puts a button on the dashboard that kills the instance serving you.")]
Config = Annotated[Path | None, config_file(lambda: router)]


def router(
    model: Model = "smollm2",
    host: Host = "127.0.0.1",
    port: Port = 8000,
    api_key: ApiKeys = None,
    admin_key: AdminKey = None,
    served_model_name: Names = None,
    chat_template: Template = None,
    drain_timeout: DrainTimeout = 30.0,
    executor: Executor = ExecutorKind.TORCH,
    join_host: JoinHost = "127.0.0.1", join_port: JoinPort = 8200,
    cluster_key: ClusterKey = None, cluster_key_file: ClusterKeyFile = None,
    policy: PolicyOption = Policy.CACHE_AWARE, suspect_after: SuspectAfter = 0.6, orphan_grace: OrphanGrace = 10.0,
    preempt_retry_count: RetryCount = 3, preempt_retry_exclude_decode: RetryExclude = True, loss_retry_count: LossCount = 8,
    fruitless_loss_count: FruitlessCount = 4, request_timeout: RequestTimeout = 600.0, absent_timeout: AbsentTimeout = 10.0,
    max_waiting: MaxWaiting = 1024, key_concurrency: KeyConcurrency = None, key_tokens_per_minute: KeyTokens = None,
    demo: Demo = False,
    access_log: AccessLog = True, log_level: LogLevelOption = LogLevel.INFO,
    config: Config = None,  # noqa: ARG001  its callback has made it the defaults of all the others
) -> None:  # fmt: skip
    """Serve a model by many instances behind one address.

    [dim]baton router[/dim] takes requests at http://127.0.0.1:8000 and instances at 127.0.0.1:8200;
    [dim]baton serve --port 0 --router 127.0.0.1:8200[/dim], as often as you like, gives it some. With
    [dim]--role prefill[/dim] and [dim]--role decode[/dim] they share the work.

    A request whose instance is killed, drained or short of room goes on at another one, in the middle of its answer; its
    client does not notice. [dim]baton drain NAME[/dim] empties an instance; [dim]/dashboard[/dim] shows all of it.
    MODEL is needed for its tokeniser and chat template only.
    """
    routing = _checked(
        policy=policy, preempt_retry_count=preempt_retry_count, preempt_retry_exclude_decode=preempt_retry_exclude_decode,
        loss_retry_count=loss_retry_count, fruitless_loss_count=fruitless_loss_count,
        deadline_us=_us(request_timeout), absent_us=_us(absent_timeout),
        waiting_max=max_waiting, suspect_us=_us(suspect_after), orphan_grace_us=_us(orphan_grace),
        key_concurrency=key_concurrency, key_tokens_per_minute=key_tokens_per_minute,
        drain_us=_us(max(drain_timeout - STOPPING_S, drain_timeout / 2, 0.001)),
    )  # fmt: skip
    scripted = executor is ExecutorKind.SCRIPTED
    _run(
        model="scripted" if scripted else model, host=host, port=port, join_host=join_host, join_port=join_port,
        api_keys=tuple(api_key or ()), admin_key=admin_key, served_model_names=tuple(served_model_name or ()),
        chat_template=chat_template, drain_timeout_s=drain_timeout, scripted=scripted, cluster_key=cluster_key,
        cluster_key_file=cluster_key_file, demo=demo, config=routing, log_level=log_level, access_log=access_log,
    )  # fmt: skip


def _us(seconds: float) -> int:
    return round(seconds * 1e6)


def _checked(**values: Any) -> RouterConfig:
    try:
        return RouterConfig(**values)
    except BatonError as error:
        raise _told(error) from None


def _run(log_level: LogLevel, access_log: bool, **settings: Any) -> None:
    # Imported late: `baton --help` must not wait for the libraries of a server.
    from baton.router import service

    log_to_stderr(log_level, access_log)
    try:
        service.route(
            service.RouterSettings(**settings), lambda line: console.print(line, style="dim", markup=False, soft_wrap=True)
        )
    except BatonError as error:
        raise _told(error) from None


def _told(error: BatonError) -> typer.Exit:
    console.print(f"baton router: {error}", style="red", markup=False, soft_wrap=True)
    return typer.Exit(1)
