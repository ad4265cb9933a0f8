"""One CPU, batch 1, greedy: transformers, our target alone, and Domino at several verify widths.

    python benchmarks/cpu_generation.py --prompts gsm8k.jsonl [--dtype bfloat16] [--plot]

Every prompt is answered by every configuration in turn, so that a drift of the machine's speed
falls on all alike. The result goes to ``cpu_generation_<dtype>.json`` in ``--out``.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from knockon import LLM, SamplingParams
from knockon.bench.environment import environment
from knockon.bench.speed import Run, run_prompts
from knockon.cli.generate import read_prompts
from knockon.models.catalog import resolve

RESULTS = Path(__file__).parent / "results"


class Transformers:
    """``transformers`` ``generate`` on the weights dequantised from the same GGUF file."""

    def __init__(self, path: Path, dtype: torch.dtype) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM
        from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

        config = LlamaConfig(**load_gguf_checkpoint(str(path))["config"])
        self.model = LlamaForCausalLM(config).eval()
        read = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=self.model)
        self.model.load_state_dict(read["tensors"], strict=False)
        self.model.tie_weights()
        self.model.to(dtype)

    def answer(self, ids: list[int], new_tokens: int, eos: list[int]) -> list[int]:
        """The greedy continuation."""
        out = self.model.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.long),
            max_new_tokens=new_tokens,
            do_sample=False,
            eos_token_id=eos,
            pad_token_id=eos[0],
        )
        return out[0, len(ids) :].tolist()


def run_transformers(run: Run, hf: Transformers, llm: LLM, prompt: Any, new_tokens: int) -> None:
    """One prompt through transformers, its first token timed apart."""
    ids = llm.encode(prompt)
    eos = list(llm.eos_token_ids)
    start = time.perf_counter()
    hf.answer(ids, 1, eos)
    first = time.perf_counter() - start
    start = time.perf_counter()
    tokens = hf.answer(ids, new_tokens, eos)
    run.seconds.append(time.perf_counter() - start)
    run.first_token.append(first)
    run.tokens.append(tokens)


def first_token_seconds(llm: LLM, ids: list[int], repeats: int = 5) -> float:
    """Median seconds to the first token of a prompt that no cache knows."""
    times = []
    for repeat in range(repeats):
        fresh = [(token + repeat) % 1000 + 100 for token in ids]
        [output] = llm.generate([fresh], SamplingParams(temperature=0.0, max_tokens=1))
        times.append(output.metrics.time_to_first_token)
    return sorted(times)[repeats // 2]


def peak_memory(model: str, draft: str, dtype: str, width: int) -> int:
    """Peak resident bytes of a fresh process that loads both models and answers one prompt."""
    code = (
        "from pathlib import Path;from knockon import LLM, SamplingParams;"
        f"llm=LLM({model!r},{draft!r},dtype={dtype!r},verify_width={width});"
        "llm.generate([[{'role':'user','content':'Count to fifty.'}]],"
        "SamplingParams(temperature=0.0,max_tokens=128));"
        "print(Path('/proc/self/status').read_text())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    [peak] = [line for line in done.stdout.splitlines() if line.startswith("VmHWM:")]
    return int(peak.split()[1]) * 1024


def main() -> None:
    formatter = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], formatter_class=formatter)
    add = parser.add_argument
    add(
        "--prompts",
        type=Path,
        required=True,
        help="a JSON object a line, with a key prompt, messages or turns",
    )
    add("--count", type=int, default=16, help="prompts taken from its start")
    add("--new-tokens", type=int, default=128, help="most tokens an answer")
    add("--dtype", default="bfloat16", choices=("bfloat16", "float32"), help="of all engines")
    add("--model", default="smollm2-135m", help="target, a GGUF file of the Llama family")
    add("--draft", default="smollm2-135m-domino", help="its drafter")
    add("--widths", type=int, nargs="+", default=[4, 6, 8, 16], help="verify widths")
    add("--out", type=Path, default=RESULTS, help="folder of the JSON file and the plot")
    parser.add_argument("--plot", action="store_true", help="also write a bar chart")
    args = parser.parse_args()
    console = Console()
    prompts = read_prompts(None, args.prompts, raw=False)[: args.count]
    params = SamplingParams(temperature=0.0, max_tokens=args.new_tokens)
    path = resolve(args.model)

    hf = Transformers(path, getattr(torch, args.dtype))
    engines = {"target alone": LLM(args.model, dtype=args.dtype, prefix_cache=False)}
    for width in args.widths:
        engines[f"Domino b{width}"] = LLM(
            args.model, args.draft, dtype=args.dtype, verify_width=width, prefix_cache=False
        )
    reference = engines["target alone"]
    runs = {"transformers": Run("transformers"), **{name: Run(name) for name in engines}}
    for llm in engines.values():
        llm.generate(prompts[:1], SamplingParams(temperature=0.0, max_tokens=16))
    hf.answer(reference.encode(prompts[0]), 16, list(reference.eos_token_ids))
    for prompt in track(prompts, description="prompts", console=console):
        run_transformers(runs["transformers"], hf, reference, prompt, args.new_tokens)
        for name, llm in engines.items():
            for _ in run_prompts(runs[name], llm, [prompt], params):
                pass

    long_prompt = list(range(100, 612))
    times = []
    for repeat in range(5):
        ids = [(token + repeat) % 1000 + 100 for token in long_prompt]
        start = time.perf_counter()
        hf.answer(ids, 1, list(reference.eos_token_ids))
        times.append(time.perf_counter() - start)
    best = max(args.widths, key=lambda w: runs[f"Domino b{w}"].tokens_per_second)
    first = {
        "transformers": sorted(times)[2],
        "target alone": first_token_seconds(reference, long_prompt),
        f"Domino b{best}": first_token_seconds(engines[f"Domino b{best}"], long_prompt),
    }
    memory = peak_memory(args.model, args.draft, args.dtype, best)

    base, alone = runs["transformers"], runs["target alone"]
    table = Table(
        title=f"CPU, {args.dtype}, batch 1, greedy, {len(prompts)} prompts of {args.prompts.stem}, "
        f"{args.new_tokens} new tokens"
    )
    table.add_column("", no_wrap=True)
    columns = ("tok/s", "vs HF", "vs alone", "accept length", "same as alone")
    for column in columns:
        table.add_column(column, justify="right")
    rows = []
    for name, run in runs.items():
        row = run.summary() | {
            "vs_transformers": round(run.tokens_per_second / base.tokens_per_second, 3),
            "vs_target_alone": round(run.tokens_per_second / alone.tokens_per_second, 3),
            "identical_to_target_alone": run.identical_to(alone),
        }
        rows.append(row)
        table.add_row(
            name,
            f"{row['tokens_per_second']:.1f}",
            f"{row['vs_transformers']:.2f}x",
            f"{row['vs_target_alone']:.2f}x",
            f"{row['mean_accept_length']:.2f}" if run.accept_lengths else "-",
            f"{row['identical_to_target_alone']} of {len(prompts)}",
        )
    console.print(table)
    console.print(
        "first token of a 512-token prompt, seconds: "
        + ", ".join(f"{name} {seconds:.3f}" for name, seconds in first.items())
    )
    console.print(f"peak memory of a fresh process with both models: {memory / 2**20:.0f} MiB")
    result = {
        "what": "CPU measurement: generation at batch 1, greedy",
        "widths": args.widths,
        "environment": environment(),
        "dtype": args.dtype,
        "prompts": args.prompts.name,
        "count": len(prompts),
        "new_tokens": args.new_tokens,
        "rows": rows,
        "first_token_of_512_seconds": {name: round(s, 4) for name, s in first.items()},
        "peak_memory_bytes": memory,
    }
    args.out.mkdir(parents=True, exist_ok=True)
    out = args.out / f"cpu_generation_{args.dtype}.json"
    out.write_text(json.dumps(result, indent=1) + "\n")
    console.print(f"written to {out}")
    if args.plot:
        plot(rows, out.with_suffix(".png"), f"{environment()['cpu']}, {args.dtype}, batch 1")


def plot(rows: list[dict[str, Any]], path: Path, subtitle: str) -> None:
    """A bar a configuration, tokens per second, the accept length above it."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.2))
    names = [row["name"] for row in rows]
    speeds = [row["tokens_per_second"] for row in rows]
    colours = ["#9aa5b1", "#52606d"] + ["#2680c2"] * (len(rows) - 2)
    bars = axes.bar(names, speeds, color=colours)
    for bar, row in zip(bars, rows, strict=True):
        accept = row["mean_accept_length"]
        label = f"{row['tokens_per_second']:.0f}"
        if row["name"].startswith("Domino"):
            label += f"\naccept {accept:.2f}"
        axes.annotate(
            label,
            (bar.get_x() + bar.get_width() / 2, bar.get_height()),
            ha="center",
            va="bottom",
            fontsize=9,
        )
    axes.set_ylabel("output tokens per second")
    axes.set_title(f"SmolLM2-135M on a CPU\n{subtitle}", fontsize=11)
    axes.margins(y=0.2)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    main()
