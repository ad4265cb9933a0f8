"""Build hook: puts the shipped drafters of ``checkpoints/`` into a wheel, beside the code.

An editable install reads them where they lie in the clone, so only a standard wheel copies them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class ShippedDrafters(BuildHookInterface):  # type: ignore[misc]
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        checkpoints = Path(self.root) / "checkpoints"
        if version == "standard" and checkpoints.is_dir():
            build_data["force_include"][str(checkpoints)] = "knockon/checkpoints"
