"""Build hook of the package: compiles the C++ kernels where there is a compiler, else builds a pure Python package."""

from __future__ import annotations

import runpy
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class KernelsHook(BuildHookInterface[Any]):
    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        root = Path(self.root)
        libraries = runpy.run_path(str(root / "mpiinfer/model/kernels/build.py"))["build"]()
        if libraries:
            # They are loaded by ctypes: any Python will do, but only this kind of machine.
            platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data["tag"] = f"py3-none-{platform}"
            build_data["pure_python"] = False
            build_data["artifacts"] += [str(library.relative_to(root)) for library in libraries]
