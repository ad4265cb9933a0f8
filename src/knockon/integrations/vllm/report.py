"""What ``knockon doctor`` says of vLLM, where it is installed; it is not imported for that."""

from __future__ import annotations

import os
from typing import Any

from knockon.errors import Refused
from knockon.integrations.vllm.settings import VARIABLES, PluginSettings
from knockon.integrations.vllm.versions import SUPPORTED, adapter_for, installed_version


def examine_vllm() -> dict[str, Any] | None:
    """Version, whether Domino drafters are served under it, and every setting; ``None`` without."""
    version = installed_version()
    if version is None:
        return None
    refused = ""
    try:
        adapter_for(version)
        PluginSettings.from_environment(os.environ)
    except Refused as refusal:
        refused = str(refusal)
    return {
        "version": version,
        "supported": list(SUPPORTED),
        "refused": refused,
        "settings": [
            {
                "name": variable.name,
                "value": os.environ.get(variable.name, variable.default),
                "default": variable.default,
                "accepted": variable.accepted,
                "meaning": variable.meaning,
            }
            for variable in VARIABLES
        ],
    }
