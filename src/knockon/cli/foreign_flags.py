"""Flags of other servers' launch lines that have no meaning here: each is answered by name."""

from __future__ import annotations

from collections.abc import Sequence

from knockon.errors import Refused

# Each takes one value.
FOREIGN = {
    "--cuda-graph-backend-prefill": (
        "short prefills run as graphs where steps do; --disable-cuda-graph switches both off"
    ),
    "--linear-attn-backend": "recurrent layers have one implementation, the engine's own",
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
OWN_BACKENDS = ("auto", "torch", "triton")
_FOREIGN_BACKENDS = {
    "flashinfer": "auto",
    "fa3": "auto",
    "flash_attn": "auto",
    "torch_native": "torch",
}


def answer_foreign_flags(extra: Sequence[str], attention_backend: str) -> tuple[list[str], str]:
    """Go through what is left of a command line.

    Args:
        extra: arguments that no option took.
        attention_backend: as asked for.

    Returns:
        A note for each flag that is passed over, and the attention backend to use.

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
    if attention_backend in _FOREIGN_BACKENDS:
        own = _FOREIGN_BACKENDS[attention_backend]
        notes.append(
            f"--attention-backend {attention_backend} is not one of "
            f"{', '.join(OWN_BACKENDS)}: using {own}"
        )
        return notes, own
    return notes, attention_backend
