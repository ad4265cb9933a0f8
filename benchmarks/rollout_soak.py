"""Many blocks through one CUDA graph of the fused rollout, each held to the plain path's.

    python benchmarks/rollout_soak.py --out FOLDER [--replays 10000]

The graph is replayed on new random inputs every time, and so is one of the plain path. Weights and
inputs are small integers (gates saturate, SiLU is 0 or the identity), so every sum is exact in any
order and the two must propose the same tokens, ties at the pool's cutoff included. What differs is
counted on the device. The result goes to ``rollout_soak.json`` in ``--out``.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from knockon.bench.environment import environment
from knockon.bench.replay import Graphed
from knockon.errors import Refused
from knockon.parallel import SingleRank, VocabShard
from knockon.rollout import DominoHead, DominoRollout

DTYPES = ("bfloat16", "float16", "float32")  # what the kernels take
LENGTH, GRU, CORRECTION = 16, 64, 64


@dataclass
class Counts:
    """Device counters over all replays, each an int64 scalar.

    Attributes:
        differing: proposals that are not the plain path's.
        outside: proposals that are no id.
        changed: proposals that are not those of the replay before.
        corrected: proposals that are not the argmax of their own base logits.
    """

    differing: Tensor
    outside: Tensor
    changed: Tensor
    corrected: Tensor


def exact_head(vocab: int, hidden: int, dtype: torch.dtype, rng: torch.Generator) -> DominoHead:
    """Gates are odd multiples of 1024, in BF16 too: a column of +-1 and three of 0 or +-2."""

    def integers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high + 1, shape, generator=rng, device=rng.device).to(dtype)

    gru_input = torch.zeros(3 * GRU, hidden, dtype=dtype, device=rng.device)
    gru_input[:, 0] = 1024 * (2 * integers(0, 1, 3 * GRU) - 1)
    gru_input[:, 1:4] = 2048 * integers(-1, 1, 3 * GRU, 3)
    draft_half = torch.zeros(CORRECTION, hidden, dtype=dtype, device=rng.device)
    draft_half[:, :4] = 1024 * integers(-1, 1, CORRECTION, 4)
    return DominoHead(
        gru_input=gru_input,
        gru_state=2048 * integers(-1, 1, 3 * GRU, GRU),
        correction_in=torch.cat((draft_half, 1024 * integers(-1, 1, CORRECTION, GRU)), dim=1),
        correction_out=integers(-1, 1, vocab, CORRECTION) / 1024,
        prefix_len=1,
        shift_label=False,
    )


def soak(args: argparse.Namespace) -> dict[str, object]:
    """Everything that is reported, as plain data."""
    device = torch.device(args.device)
    on_gpu = device.type == "cuda"
    dtype: torch.dtype = getattr(torch, args.dtype)
    rng = torch.Generator(device).manual_seed(args.seed)
    vocab, hidden, batch = args.vocab_size, args.hidden_size, args.batch
    head = exact_head(vocab, hidden, dtype, rng)
    embedding = torch.randint(-1, 2, (vocab, hidden), generator=rng, device=device).to(dtype)
    embedding[:, 0] = 2 * torch.randint(0, 2, (vocab,), generator=rng, device=device) - 1
    lm_head = torch.randint(-1, 2, (vocab, hidden), generator=rng, device=device).to(dtype)
    shard = VocabShard.deal(vocab, 1, 0)
    fused = DominoRollout(
        head,
        embedding,
        lm_head,
        shard,
        SingleRank(),
        pool_size=args.pool_size,
        exchange="compact",
        implementation="fused",
    )
    plain = fused.with_settings(exchange="full", implementation="plain")
    z = torch.zeros(batch, LENGTH, hidden, dtype=dtype, device=device)
    bonus = torch.zeros(batch, dtype=torch.int64, device=device)

    def argmax_of_base() -> Tensor:
        return (z[:, 1:].flatten(0, 1) @ lm_head.t()).argmax(-1).view(batch, -1)

    def renew() -> None:
        z.random_(-2, 3, generator=rng)
        bonus.random_(0, vocab, generator=rng)

    programs = [
        lambda: fused(z, bonus, in_graph=True),
        lambda: plain(z, bonus, in_graph=True),
        argmax_of_base,
    ]
    renew()
    runs = [Graphed(program) if on_gpu else program for program in programs]
    counts = Counts(*(torch.zeros((), dtype=torch.int64, device=device) for _ in range(4)))
    before = torch.zeros(batch, LENGTH - 1, dtype=torch.int64, device=device)
    start = time.perf_counter()
    for number in range(args.replays):
        renew()
        found, wanted, greedy = (run() for run in runs)
        counts.differing += (found != wanted).sum()
        counts.outside += ((found < 0) | (found >= vocab)).sum()
        counts.corrected += (found != greedy).sum()
        if number:
            counts.changed += (found != before).sum()
        before.copy_(found)
    proposals = args.replays * batch * (LENGTH - 1)
    totals = {name: int(value) for name, value in vars(counts).items()}
    return {
        "what": "fused rollout, replayed, against the plain path on exact inputs",
        "method": "CUDA graph replays, new inputs each" if on_gpu else "eager calls on a CPU",
        "environment": environment(),
        "settings": {k: v for k, v in vars(args).items() if k != "out"},
        "shape": {"V": vocab, "H": hidden, "G": GRU, "E": CORRECTION, "L": LENGTH},
        "blocks": args.replays * batch,
        "proposals": proposals,
        **totals,
        "nan_rows": int(fused.nan_rows),
        "seconds": round(time.perf_counter() - start, 1),
    }


def main() -> None:
    formatter = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], formatter_class=formatter)
    parser.add_argument("--replays", type=int, default=10_000, help="blocks of --batch requests")
    parser.add_argument("--batch", type=int, default=8, help="B")
    parser.add_argument("--vocab-size", type=int, default=32_768, help="V")
    parser.add_argument("--hidden-size", type=int, default=512, help="H")
    parser.add_argument("--pool-size", type=int, default=2048, help="K")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu only in Triton's interpreter"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True, help="folder of the JSON file")
    args = parser.parse_args()
    for name in ("replays", "batch", "vocab_size", "hidden_size", "pool_size"):
        least = 4 if name == "hidden_size" else 1
        if getattr(args, name) < least:
            parser.error(f"--{name.replace('_', '-')} must be at least {least}")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no CUDA device here")
    try:
        with torch.no_grad():
            result = soak(args)
    except Refused as refusal:
        parser.error(str(refusal))
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "rollout_soak.json").write_text(json.dumps(result, indent=1) + "\n")
    shown = ("blocks", "proposals", "differing", "outside", "changed", "corrected", "seconds")
    print(", ".join(f"{name} {result[name]}" for name in shown))
    if result["differing"] or result["outside"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
