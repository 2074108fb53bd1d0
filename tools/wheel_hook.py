"""Puts the kernels that `tools/build_kernels.py` has built into the wheel, and tags it for their platform.

The variable WHEEL_KERNELS names their folder. Without it, or where nothing was built, the wheel has no native code and is
for every platform. Imports nothing of Baton: this runs in the environment that builds.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

VARIABLE = "WHEEL_KERNELS"
TAG_NAME = "wheel.tag"
IN_WHEEL = "baton/executor/cpu/prebuilt"


class WheelKernels(BuildHookInterface[Any]):
    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        folder = Path(os.environ.get(VARIABLE, os.devnull))
        if version == "editable" or not (folder / TAG_NAME).is_file():
            return
        build_data["pure_python"] = False
        build_data["tag"] = (folder / TAG_NAME).read_text(encoding="utf-8").strip()
        for path in sorted(folder.iterdir()):
            if path.name != TAG_NAME:
                build_data["force_include"][str(path)] = f"{IN_WHEEL}/{path.name}"
