"""The options of a router's process; imports no server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from baton.core.setting import Panel, Setting
from baton.node.settings import AdminSettings, HttpSettings, RecordSettings


@dataclass(frozen=True, kw_only=True)
class RouterProcessSettings(HttpSettings, AdminSettings, RecordSettings):
    """MODEL provides tokeniser and chat template; no weights are loaded."""

    join_host: Annotated[
        str,
        Setting("join-host", Panel.INSTANCES, "Address where instances join. Another than loopback needs a cluster key."),
    ] = "127.0.0.1"
    join_port: Annotated[
        int, Setting("join-port", Panel.INSTANCES, "Port where instances join; 0 picks a free one.", 0, 65535)
    ] = 8200
    cluster_key: Annotated[
        str | None,
        Setting(
            "cluster-key", Panel.INSTANCES, "What instances prove themselves with; better in the environment or a file."
        ),
    ] = None
    cluster_key_file: Annotated[
        str | None,
        Setting("cluster-key-file", Panel.INSTANCES, "A file with that key. Default, on loopback: one kept for this user."),
    ] = None
    demo: Annotated[
        bool,
        Setting(
            "demo", Panel.PLAIN, "Puts a button on the dashboard that kills the instance serving you.",
            has_variable=False, is_flag=True,
        ),
    ] = False  # fmt: skip
