"""What a supported version of vLLM looks like to the plugin."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from knockon.drafters.config import DraftConfig
from knockon.errors import Refused
from knockon.integrations.vllm.after_import import after_import
from knockon.integrations.vllm.checkpoint import asks_for_domino


@dataclass(frozen=True)
class Diversion:
    """A class of vLLM's that drafts with DFlash, and ours, which drafts with Domino.

    Attributes:
        module, name: where vLLM defines it.
        ours: ``module:name`` of its subclass.
        overridden: methods that the subclass overrides; one that vLLM lacks is refused.
    """

    module: str
    name: str
    ours: str
    overridden: tuple[str, ...]


@dataclass(frozen=True)
class Adapter:
    """All that the plugin does differently from version to version.

    Attributes:
        refuse: refuses what this version cannot do, given vLLM's configuration and the drafter's.
    """

    version: str
    diversions: tuple[Diversion, ...]
    refuse: Callable[[Any, DraftConfig], None]

    def install(self) -> None:
        """Divert vLLM's DFlash classes, each as soon as vLLM has imported it; safe to repeat."""
        for diversion in self.diversions:
            after_import(diversion.module, _Divert(diversion, self.version))


@dataclass(frozen=True)
class _Divert:
    diversion: Diversion
    version: str

    def __call__(self, module: Any) -> None:
        """Make vLLM's class give ours where a Domino checkpoint is asked for, itself otherwise."""
        theirs = getattr(module, self.diversion.name, None)
        missing = [n for n in self.diversion.overridden if not hasattr(theirs, n)]
        if theirs is None or missing:
            raise Refused(
                f"{self.diversion.module}.{self.diversion.name}",
                f"without {', '.join(missing)}",
                f"the class of vLLM {self.version}",
                "Is it a modified build?",
            )
        if "_knockon_diverted" in theirs.__dict__:
            return
        ours = self.diversion.ours

        def choose(cls: type, vllm_config: Any, *_: Any, **__: Any) -> Any:
            # Subclasses, vLLM's own other drafters among them, stay what they are.
            if cls is theirs and asks_for_domino(vllm_config.speculative_config):
                where, name = ours.split(":")
                cls = getattr(importlib.import_module(where), name)
            return object.__new__(cls)

        theirs.__new__ = staticmethod(choose)
        theirs._knockon_diverted = True
