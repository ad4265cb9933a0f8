"""What the plugin can be told, by environment variables, which vLLM hands on to its workers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from knockon.errors import Refused
from knockon.rollout.exchange import EXCHANGES

PREFIX = "KNOCKON_VLLM_"
_DRAFT_HEADS = ("auto", "fp8")
_ROLLOUTS = ("auto", "plain", "fused")


class Variable(NamedTuple):
    """One environment variable.

    Attributes:
        field: of :class:`PluginSettings`.
        accepted: for people.
    """

    name: str
    field: str
    default: str
    accepted: str
    meaning: str


VARIABLES = (
    Variable(
        f"{PREFIX}POOL_SIZE",
        "pool_size",
        "2048",
        "0 for the whole vocabulary, or more",
        "ids in Domino's candidate pool",
    ),
    Variable(
        f"{PREFIX}EXCHANGE",
        "exchange",
        "auto",
        ", ".join(EXCHANGES),
        "how tensor-parallel ranks bring their logits together",
    ),
    Variable(
        f"{PREFIX}DRAFT_HEAD",
        "draft_head",
        "auto",
        ", ".join(_DRAFT_HEADS),
        "LM head that proposes: vLLM's own, or an FP8 copy of it",
    ),
    Variable(
        f"{PREFIX}ROLLOUT",
        "rollout",
        "auto",
        ", ".join(_ROLLOUTS),
        "the chain by Triton kernels (fused) or by PyTorch (plain)",
    ),
)


@dataclass(frozen=True)
class PluginSettings:
    """The plugin's settings; ``VARIABLES`` says what they mean."""

    pool_size: int = 2048
    exchange: str = "auto"
    draft_head: str = "auto"
    rollout: str = "auto"

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> PluginSettings:
        """Read the variables of ``environment``.

        Raises:
            Refused: a value that is not accepted, or a variable of this prefix that does not exist.
        """
        known = {variable.name for variable in VARIABLES}
        unknown = sorted(n for n in environment if n.startswith(PREFIX) and n not in known)
        if unknown:
            raise Refused(unknown[0], environment[unknown[0]], f"one of {', '.join(sorted(known))}")
        found = {v.field: environment.get(v.name, v.default) for v in VARIABLES}
        size = found["pool_size"]
        if not (size.isascii() and size.isdigit()):
            raise Refused(f"{PREFIX}POOL_SIZE", size, "0 for the whole vocabulary, or more")
        choices = {"exchange": EXCHANGES, "draft_head": _DRAFT_HEADS, "rollout": _ROLLOUTS}
        for variable in VARIABLES:
            accepted = choices.get(variable.field)
            if accepted is not None and found[variable.field] not in accepted:
                raise Refused(variable.name, found[variable.field], f"one of {accepted}")
        return cls(int(size), found["exchange"], found["draft_head"], found["rollout"])
