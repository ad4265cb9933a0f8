"""Step times and acceptance that others measured, for the simulator."""

from __future__ import annotations

from statistics import fmean

from knockon.bench.width_simulator import RequestClass, StepTable, fit_rates

# Domino on Qwen3.6-27B, TP2 on two A100s, mean accept lengths at widths 8 and 16, concurrency 1
# (the tables published with SGLang's tensor-parallel Domino).
_ACCEPT_LENGTHS = {
    "GSM8K": (6.335, 9.163),
    "MATH500": (6.201, 8.760),
    "HumanEval": (5.655, 7.445),
    "MBPP": (5.405, 6.803),
    "MT-Bench": (4.758, 5.851),
    "Alpaca": (4.707, 5.937),
}
DOMINO_CLASSES = tuple(
    RequestClass(name, fit_rates(*lengths)) for name, lengths in _ACCEPT_LENGTHS.items()
)

# From the same tables: output tokens a second by concurrency for target-only, b8 and b16, each
# over the workloads in the order above; and the accept lengths at that concurrency.
_SERVED = {
    1: (
        (47.2, 47.3, 47.2, 47.6, 47.1, 47.2),
        (206.0, 217.7, 198.5, 189.0, 155.7, 150.1),
        (248.0, 270.6, 235.1, 214.0, 161.9, 157.7),
        (6.335, 6.201, 5.655, 5.405, 4.758, 4.707),
        (9.163, 8.760, 7.445, 6.803, 5.851, 5.937),
    ),
    8: (
        (324.4, 331.6, 331.9, 326.7, 330.6, 332.6),
        (1153.2, 1255.2, 1155.9, 1053.7, 881.5, 862.9),
        (1131.2, 1252.5, 1078.5, 950.0, 752.8, 722.7),
        (6.309, 6.194, 5.659, 5.404, 4.749, 4.743),
        (9.310, 8.813, 7.418, 6.787, 5.908, 5.835),
    ),
    32: (
        (862.9, 963.3, 953.4, 919.5, 866.8, 788.1),
        (1817.5, 2021.3, 1879.7, 1547.2, 1286.9, 1315.0),
        (1574.5, 1716.2, 1541.3, 1342.4, 920.3, 894.1),
        (6.288, 6.206, 5.677, 5.373, 4.768, 4.721),
        (9.313, 8.789, 7.449, 6.842, 5.923, 5.812),
    ),
}


def a100_tp2() -> StepTable:
    """Mean seconds a step (accept length x concurrency / throughput), prefill shared out in it."""
    points = {}
    for batch, (alone, at_8, at_16, lengths_8, lengths_16) in _SERVED.items():
        points[batch, 1] = fmean(batch / speed for speed in alone)
        for width, speeds, lengths in ((8, at_8, lengths_8), (16, at_16, lengths_16)):
            points[batch, width] = fmean(
                batch * n / speed for n, speed in zip(lengths, speeds, strict=True)
            )
    return StepTable("Qwen3.6-27B, 2 x A100 (published)", points)


def h200() -> StepTable:
    """Qwen3-8B on one H200 under vLLM: widths 1 and 16 measured, 8 estimated.

    The estimate takes the drafter (which always runs its whole block) as 0.9 ms, 1.1 ms and 3 ms of
    a step of width 16, and what is left above the target alone as growing with the rows.
    """
    points = {}
    drafting = {1: 0.9, 8: 1.1, 32: 3.0}
    for batch, (alone, block) in {1: (5.3, 6.5), 8: (5.6, 8.1), 32: (6.3, 18.2)}.items():
        points[batch, 1] = alone / 1000
        points[batch, 16] = block / 1000
        rows = (block - alone - drafting[batch]) * 7 / 15
        points[batch, 8] = (alone + drafting[batch] + rows) / 1000
    return StepTable("Qwen3-8B, 1 x H200 (width 8 estimated)", points)
