"""Which part of a step a kernel (or, on a CPU, an operator) belongs to, told from its name."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import knockon

ATTENTION = "attention"
MATMUL = "matmul"
ROLLOUT = "rollout"
NORM = "norm, rope, activation"
SAMPLING = "argmax, sampling"
COPIES = "copies, indexing"
OTHER = "other"
PARTS = (MATMUL, ATTENTION, ROLLOUT, NORM, SAMPLING, COPIES, OTHER)

# The project's own kernels go by the file they stand in, the first prefix that fits.
_OWN = (
    ("rollout/fused/argmax", SAMPLING),  # the target's draws too go through it
    ("rollout/", ROLLOUT),
    ("layers/attention/", ATTENTION),
    ("layers/fused/delta_block", ATTENTION),  # what mixes tokens in other layers
    ("layers/linear", MATMUL),
    ("layers/fused/stream_linear", MATMUL),
    ("layers/", NORM),
    ("models/", NORM),
    ("drafters/", NORM),
    ("engine/", SAMPLING),
)
# What PyTorch and its libraries run goes by words in the name, the first that is found.
_WORDS = (
    (ATTENTION, r"attention|attend|flash|fmha|sdpa"),
    (SAMPLING, r"argmax|argmin|topk|sort|exponential|radix|cumprod|scan"),
    (
        MATMUL,
        r"gemm|gemv|cublas|cutlass|nvjet|xmma|splitk|split_k|wgmma|matmul|linear|addmm|\bb?mm\b",
    ),
    (NORM, r"norm|rms|rope|rotary|silu|swiglu|sigmoid|tanh|softmax|roll"),
    (
        COPIES,
        r"memcpy|memset|copy|catarray|\bcat\b|fill|zero|index|gather|scatter|embedding|arange|"
        r"select|\bto\b|clone|contiguous|stack",
    ),
)
_COMPILED = tuple((part, re.compile(words, re.IGNORECASE)) for part, words in _WORDS)


def part_of(name: str) -> str:
    """The part that a kernel or operator of this name belongs to."""
    own = own_kernels().get(name)
    if own is not None:
        return own
    for part, words in _COMPILED:
        if words.search(name):
            return part
    return OTHER


@cache
def own_kernels() -> dict[str, str]:
    """Names of the project's Triton kernels (functions under ``@jit``) and their parts."""
    package = Path(knockon.__file__).parent
    found = {}
    for file in sorted(package.rglob("*.py")):
        place = file.relative_to(package).as_posix()
        part = next((part for prefix, part in _OWN if place.startswith(prefix)), None)
        if part is None or "jit" not in (text := file.read_text(encoding="utf-8")):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef) and any(_is_jit(d) for d in node.decorator_list):
                found[node.name] = part
    return found


def _is_jit(decorator: ast.expr) -> bool:
    called = decorator.func if isinstance(decorator, ast.Call) else decorator
    return isinstance(called, ast.Name | ast.Attribute) and "jit" in ast.unparse(called)
