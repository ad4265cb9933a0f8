"""Linear layers of few rows on one GPU: cuBLAS beside the weight-streaming kernel.

    python benchmarks/linear.py --json linear.json [--quick]

Qwen3-8B shapes, BF16. Every launch is checked against its plain twin before it is timed. First each
shape alone, over copies of the weight that do not fit in the L2 cache together, a small kernel
ahead of every product; the time of a product is what it adds to the small kernels' own. Then the
products of a whole model in order, 36 layers and the LM head, among as many small kernels as a
decoder has, each reading what the one before it wrote. Times are medians of CUDA-graph replays.
Printed last: entries for ``knockon/layers/fused/stream_launch.py``.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import triton
from linear_shapes import (
    DOWN,
    GATE_UP,
    GATED,
    HEAD,
    IN_LAYER,
    OUTPUT,
    QKV,
    SHAPES,
    Shape,
    candidates,
)
from linear_small import small
from torch import Tensor

from knockon.bench.needs_gpu import needed_gpu
from knockon.bench.replay import Graphed, median_us
from knockon.layers.fused.silu_mul import silu_mul_kernel
from knockon.layers.fused.stream_launch import StreamLaunch
from knockon.layers.fused.stream_linear import stream_linear_kernel, stream_linear_plain

LAYERS = 36
COLD_BYTES = 300e6
WORKERS = 12
# What a launch that cannot be raises: too much shared memory, or what the compiler refuses.
FAILURES = (
    triton.runtime.errors.OutOfResources,
    triton.compiler.errors.CompilationError,
    RuntimeError,
)


def timed(run: Callable[[], Tensor], rounds: int, seconds: float) -> tuple[float, Tensor]:
    """Median time of a replay of ``run``, and what it returned, which each replay writes anew."""
    graphed = Graphed(run, tidy=False)
    spent = median_us(graphed, torch.device("cuda"), rounds=rounds, seconds=seconds)
    result = graphed().clone()
    torch.cuda.synchronize()
    return spent, result


# Every launch is compiled ahead, by several processes at once, into Triton's cache.


def compile_one(job: tuple[StreamLaunch, int, bool, bool]) -> None:
    launch, m, gated, early = job
    x = torch.zeros((m, launch.block_k * launch.splits * 16), dtype=torch.bfloat16, device="cuda")
    weight = x.new_zeros((launch.block_n * 4, x.shape[1]))
    try:
        stream_linear_kernel(x, weight, None, launch, gated, early)
        torch.cuda.synchronize()
    except FAILURES:
        return  # :meth:`Bench.tune` meets it again


def compile_small(job: tuple[int, bool]) -> None:
    pieces, early = job
    source = torch.zeros((2, 4096), dtype=torch.bfloat16, device="cuda")
    small(source, 4096, early, source.new_zeros((4096, 8192)) if pieces else None, pieces)
    torch.cuda.synchronize()


def compile_all(pool: ProcessPoolExecutor, jobs: Iterable[tuple[StreamLaunch, int, bool, bool]]):
    """One job for what compiles alike: rows count by their power of two, splits not at all."""
    alike = {}
    for launch, m, gated, early in jobs:
        alike[replace(launch, splits=min(2, launch.splits)), max(16, m), gated, early] = None
    began = time.perf_counter()
    list(pool.map(compile_one, alike))
    print(f"compiled {len(alike)} kernels in {time.perf_counter() - began:.1f} s", flush=True)


def check(got: Tensor, wanted: Tensor, what: str) -> None:
    wrong = ((got.float() - wanted.float()).norm() / wanted.float().norm()).item()
    if not wrong <= 6e-3:
        raise SystemExit(f"wrong product, by {wrong:.2e}: {what}")


class Bench:
    """Weights of a whole model, and the times of its products."""

    def __init__(self, layers: int, quick: bool) -> None:
        def weights(shape: Shape, count: int) -> list[Tensor]:
            made = [
                torch.empty((shape.n, shape.k), dtype=torch.bfloat16, device="cuda")
                for _ in range(count)
            ]
            return [weight.normal_(std=shape.k**-0.5) for weight in made]

        self.weights = {shape.name: weights(shape, layers) for shape in IN_LAYER}
        self.weights[GATED.name] = self.weights[GATE_UP.name]
        self.weights[HEAD.name] = weights(HEAD, 1)
        self.layers = layers
        self.small_us: dict[tuple[Shape, int], float] = {}
        self.rounds, self.seconds = (3, 0.004) if quick else (5, 0.008)

    def product(
        self, shape: Shape, x: Tensor, weight: Tensor, launch: StreamLaunch | None, early: bool
    ) -> Tensor:
        if launch is not None:
            return stream_linear_kernel(x, weight, None, launch, shape.gated, early)
        y = F.linear(x, weight)
        return silu_mul_kernel(y) if shape.gated else y

    def alone(self, shape: Shape, m: int, launch: StreamLaunch | None) -> float:
        """Microseconds that one product adds to the small kernel ahead of it."""
        weights = self.weights[shape.name]
        weights = weights[: max(1, min(len(weights), round(COLD_BYTES / shape.bytes + 0.5)))]
        start = torch.randn((m, shape.n), dtype=torch.bfloat16, device="cuda")

        def run(with_product: bool) -> Tensor:
            y = start
            for weight in weights:
                x = small(y, shape.k, True)
                y = self.product(shape, x, weight, launch, True) if with_product else start
            return y

        if launch is not None:
            x = torch.randn((m, shape.k), dtype=torch.bfloat16, device="cuda")
            got = stream_linear_kernel(x, weights[0], None, launch, shape.gated)
            check(got, stream_linear_plain(x, weights[0], None, shape.gated), f"{shape}, {launch}")
        if (shape, m) not in self.small_us:
            self.small_us[shape, m], _ = timed(lambda: run(False), 5, self.seconds)
        spent, _ = timed(lambda: run(True), self.rounds, self.seconds)
        return (spent - self.small_us[shape, m]) / len(weights)

    def tune(self, shape: Shape, m: int, launches: Iterable[StreamLaunch]) -> list[dict[str, Any]]:
        """Each launch's time, quickest first."""
        found = []
        for launch in launches:
            try:
                found.append({"launch": asdict(launch), "us": self.alone(shape, m, launch)})
            except FAILURES as error:
                print(f"{shape.name}, M={m}, {launch}: {str(error).splitlines()[0]}", flush=True)
        return sorted(found, key=lambda entry: entry["us"])

    def chain(
        self,
        m: int,
        launches: dict[str, StreamLaunch],
        early_small: bool,
        early: bool,
        prefetch: int = 0,
    ) -> tuple[float, Tensor]:
        """A model's products and small kernels: microseconds, and its last output.

        Args:
            launches: by the shape's name; cuBLAS multiplies where there is none.
            prefetch: million bytes of the weight that each small kernel asks for ahead of cuBLAS.
        """
        gated = GATED.name in launches
        order = (QKV, OUTPUT, GATED if gated else GATE_UP, DOWN)
        generator = torch.Generator("cuda").manual_seed(m)
        start = torch.randn((m, DOWN.n), dtype=torch.bfloat16, device="cuda", generator=generator)

        def step(shape: Shape, y: Tensor, index: int, ahead: int) -> Tensor:
            weight = self.weights[shape.name][index]
            launch = launches.get(shape.name)
            # Of every row the first pieces, so that the product's programs gain alike.
            pieces = int(min(prefetch * ahead * 1e6, shape.bytes)) // (512 * shape.n)
            pieces = 1 << (pieces.bit_length() - 1) if pieces and launch is None else 0
            x = y
            for i in range(ahead):
                asks = pieces > 0 and i == 0
                x = small(x, shape.k, early_small, weight if asks else None, pieces)
            return self.product(shape, x, weight, launch, early)

        def run() -> Tensor:
            y = start
            for index in range(self.layers):
                for shape in order:
                    ahead = 0 if shape is DOWN and gated else shape.ahead
                    y = step(shape, y, index, ahead)
            return step(HEAD, y, 0, 1)

        return timed(run, self.rounds, 4 * self.seconds)


def tune_shapes(
    bench: Bench, pool: ProcessPoolExecutor, row_counts: list[int]
) -> tuple[list[dict[str, Any]], dict[int, dict[str, StreamLaunch]]]:
    """Times of every shape and launch, and for each number of rows the launches that won."""
    pairs = [(shape, m) for m in row_counts for shape in SHAPES]
    compile_all(
        pool,
        [(launch, m, shape.gated, True) for shape, m in pairs for launch in candidates(shape, m)],
    )
    results = []
    for shape, m in pairs:
        cublas = bench.alone(shape, m, None)
        results.append(
            asdict(shape)
            | {"m": m, "cublas_us": cublas, "stream": bench.tune(shape, m, candidates(shape, m))}
        )
    # How much is asked for early matters only once the rest is chosen.
    further = {}
    for i, (shape, _) in enumerate(pairs):
        best = [StreamLaunch(**entry["launch"]) for entry in results[i]["stream"][:1]]
        further[i] = [
            replace(launch, prefetch=p)
            for launch in best
            for p in (0, 512, 2048, 4096)
            if p * launch.splits <= 2 * shape.k
        ]
    compile_all(
        pool,
        [(x, pairs[i][1], pairs[i][0].gated, True) for i, found in further.items() for x in found],
    )
    best_of: dict[int, dict[str, StreamLaunch]] = {m: {} for m in row_counts}
    print(f"{'shape':>14}{'M':>4}{'cuBLAS us':>11}{'TB/s':>6}{'stream us':>11}{'TB/s':>6}  launch")
    for i, (shape, m) in enumerate(pairs):
        result = results[i]
        result["stream"] += bench.tune(shape, m, further[i])
        result["stream"].sort(key=lambda entry: entry["us"])
        best = result["stream"][0]
        launch = StreamLaunch(**best["launch"])
        best_of[m][shape.name] = launch
        rates = [shape.bytes / us / 1e6 for us in (result["cublas_us"], best["us"])]
        print(
            f"{shape.name:>14}{m:>4}{result['cublas_us']:>11.2f}{rates[0]:>6.2f}"
            f"{best['us']:>11.2f}{rates[1]:>6.2f}  {tuple(asdict(launch).values())}",
            flush=True,
        )
    return results, best_of


def time_chains(
    bench: Bench, m: int, launches: dict[str, StreamLaunch], winners: dict[str, StreamLaunch]
) -> dict[str, float]:
    plain = {name: x for name, x in launches.items() if name != GATED.name}
    gated = {name: x for name, x in launches.items() if name != GATE_UP.name}
    times: dict[str, float] = {}
    times["cublas"], _ = bench.chain(m, {}, False, False)
    times["cublas, small early"], _ = bench.chain(m, {}, True, False)
    for prefetch in (7, 13, 26):
        name = f"cublas, prefetch {prefetch} MB"
        times[name], _ = bench.chain(m, {}, False, False, prefetch)
    times["cublas, small early, prefetch 13 MB"], _ = bench.chain(m, {}, True, False, 13)
    times["stream, nothing early"], wanted = bench.chain(m, plain, False, False)
    times["stream, all early"], got = bench.chain(m, plain, True, True)
    if not torch.equal(got, wanted):
        print(f"WRONG: starting early changed the result at {m} rows", flush=True)
        times["WRONG"] = float("nan")
    times["stream with silu, all early"], _ = bench.chain(m, gated, True, True)
    times["stream where it wins"], _ = bench.chain(m, winners, True, True)
    times["stream where it wins, prefetch 13 MB"], _ = bench.chain(m, winners, True, True, 13)
    times["cublas, again"], _ = bench.chain(m, {}, False, False)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True, help="file to write")
    parser.add_argument("--quick", action="store_true", help="1 and 16 rows only, fewer rounds")
    parser.add_argument("--layers", type=int, default=LAYERS, help="of the whole model")
    args = parser.parse_args()
    needed_gpu()
    torch.manual_seed(0)
    began = time.perf_counter()
    row_counts = [1, 16] if args.quick else [1, 16, 32, 64]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(WORKERS, mp_context=context) as pool, torch.inference_mode():
        bench = Bench(args.layers, args.quick)
        list(pool.map(compile_small, [(p, e) for p in (0, 1, 2, 4, 8, 16) for e in (False, True)]))
        shapes, best_of = tune_shapes(bench, pool, row_counts)
        compile_all(
            pool,
            [
                (x, m, name == GATED.name, False)
                for m, found in best_of.items()
                for name, x in found.items()
            ],
        )
        print(f"tuned after {time.perf_counter() - began:.0f} s", flush=True)
        record = {
            "gpu": torch.cuda.get_device_name(),
            "versions": {"torch": torch.__version__, "triton": triton.__version__},
            "dtype": "bfloat16",
            "layers": args.layers,
            "shapes": shapes,
        }
        save(args.json, record)
        chains: dict[int, dict[str, float]] = {}
        entries: dict[tuple[int, int, int], list[tuple[int, StreamLaunch]]] = {}
        cublas = {(x["name"], x["m"]): x["cublas_us"] for x in shapes}
        fastest = {(x["name"], x["m"]): x["stream"][0]["us"] for x in shapes}
        for m in sorted({*row_counts, 8}):
            tuned = min(count for count in row_counts if count >= m)
            winners = {}
            for shape in (*IN_LAYER, HEAD):
                key = (shape.name, tuned)
                if fastest[key] < 0.98 * cublas[key]:
                    winners[shape.name] = best_of[tuned][shape.name]
                    if tuned == m:
                        size = (shape.n, shape.k, 2)
                        entries.setdefault(size, []).append((m, winners[shape.name]))
            chains[m] = time_chains(bench, m, best_of[tuned], winners)
    print(f"{'whole model, ms':>40}" + "".join(f"{f'M={m}':>9}" for m in chains))
    for name in next(iter(chains.values())):
        spent = [times.get(name, 0.0) / 1000 for times in chains.values()]
        print(f"{name:>40}" + "".join(f"{x:>9.3f}" for x in spent))
    for size, found in entries.items():
        print(f"    {size}: (")
        for most, launch in found:
            print(f"        ({most}, {launch}),")
        print("    ),")
    print(f"{time.perf_counter() - began:.0f} s in all")
    save(args.json, record | {"chain_us": chains})
    if any("WRONG" in times for times in chains.values()):
        raise SystemExit("starting early changed a result: see above")


def save(path: Path, record: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
