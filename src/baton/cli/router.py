"""`baton router`: options in, one RouterSettings out. They are declared by RouterProcessSettings and RouterConfig."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Annotated, Any

from baton.cli.declared_options import GivenOptions, taking_settings
from baton.cli.options import config_file
from baton.cli.serve import log_to_stderr, process_fields, stage_view, tell, told_in_one_line
from baton.core.routing.config import RouterConfig
from baton.router.settings import RouterProcessSettings

STOPPING_S = 2.0
"""Open requests of a draining instance are moved this long before its drain timeout."""

Config = Annotated[Path | None, config_file(lambda: router)]


@taking_settings(RouterProcessSettings, RouterConfig)
def router(*, given: GivenOptions, config: Config = None) -> None:  # noqa: ARG001  its callback has made it the others' defaults
    """Serve a model by many instances behind one address.

    [dim]baton router[/dim] takes requests at http://127.0.0.1:8000 and instances at 127.0.0.1:8200;
    [dim]baton serve --port 0 --router 127.0.0.1:8200[/dim], as often as you like, gives it some. With
    [dim]--role prefill[/dim] and [dim]--role decode[/dim] they share the work.

    A request whose instance is killed, drained or short of room goes on at another one, in the middle of its answer; its
    client does not notice. [dim]baton drain NAME[/dim] empties an instance; [dim]/dashboard[/dim] shows all of it.
    MODEL is needed for its tokeniser and chat template only.
    """
    settings = process_fields(given, RouterProcessSettings)
    drain_s = settings["drain_timeout_s"]
    drain_us = round(max(drain_s - STOPPING_S, drain_s / 2, 0.001) * 1e6)
    with told_in_one_line("baton router", settings):
        _run(config=RouterConfig(**given.fields_of(RouterConfig), drain_us=drain_us), **settings)


def _run(**settings: Any) -> None:
    # Imported late: `baton --help` must not wait for the libraries of a server.
    from baton.node.start_stages import StartStages
    from baton.router import service

    log_to_stderr(settings)
    log_format = settings["log_format"]
    with contextlib.closing(StartStages(stage_view(log_format))) as stages:
        service.route(service.RouterSettings(**settings), lambda line: tell(line, log_format), stages)
