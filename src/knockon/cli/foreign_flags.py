"""Flags of other servers' launch lines that have no meaning here: each is answered by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from knockon.errors import Refused

# Each takes one value.
FOREIGN = {
    "--cuda-graph-backend-prefill": (
        "short prefills run as graphs where steps do; --disable-cuda-graph switches both off"
    ),
    "--mamba-radix-cache-strategy": (
        "states of recurrent layers are kept at page boundaries, the nearest to extra_buffer; "
        "--max-mamba-cache-size says how many, --disable-radix-cache keeps none"
    ),
    "--speculative-draft-attention-backend": (
        "the drafter attends with the target's backend; use --attention-backend"
    ),
    "--speculative-eagle-topk": "proposals are one chain here, no tree; leave it out",
}
FOREIGN_SWITCHES = {
    "--disable-custom-all-reduce": "ranks meet through NCCL or gloo alone; leave it out",
    "--trust-remote-code": "no code from a model's folder is ever run; leave it out",
    "--skip-server-warmup": "nothing is warmed up by requests; leave it out",
}


@dataclass(frozen=True)
class Backends:
    """Names that a flag takes, and which of them stands for another server's."""

    own: tuple[str, ...]
    foreign: Mapping[str, str]


BACKENDS = {
    "--attention-backend": Backends(
        ("auto", "torch", "triton"),
        {"flashinfer": "auto", "fa3": "auto", "flash_attn": "auto", "torch_native": "torch"},
    ),
    "--linear-attn-backend": Backends(
        ("auto", "torch", "fla"), {"triton": "auto", "cutedsl": "auto", "flashinfer": "auto"}
    ),
}


def own_backend(flag: str, asked: str) -> tuple[list[str], str]:
    """The backend to use, and a note where ``asked`` is another server's name."""
    names = BACKENDS[flag]
    if asked not in names.foreign:
        return [], asked
    use = names.foreign[asked]
    return [f"{flag} {asked} is not one of {', '.join(names.own)}: using {use}"], use


def answer_foreign_flags(extra: Sequence[str]) -> list[str]:
    """Go through what is left of a command line.

    Args:
        extra: arguments that no option took.

    Returns:
        A note for each flag that is passed over.

    Raises:
        Refused: an argument that is not known at all, or a flag without its value.
    """
    notes = []
    left = list(extra)
    while left:
        flag, equals, value = left.pop(0).partition("=")
        if flag in FOREIGN_SWITCHES and not equals:
            notes.append(f"{flag} has no meaning here and is passed over: {FOREIGN_SWITCHES[flag]}")
            continue
        if flag not in FOREIGN:
            raise Refused("argument", flag, "an option of `knockon serve --help`")
        if not equals:
            if not left or left[0].startswith("--"):
                raise Refused(flag, None, "a value")
            value = left.pop(0)
        notes.append(f"{flag} {value} has no meaning here and is passed over: {FOREIGN[flag]}")
    return notes
