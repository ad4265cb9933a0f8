"""Options that several benchmarks share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Dtype = Annotated[
    str,
    typer.Option(
        help="auto (bfloat16 on CUDA, float32 on a CPU), bfloat16, float16, float32, float64."
    ),
]
Device = Annotated[str, typer.Option(help="auto, cuda or cpu.")]
JsonFile = Annotated[Path | None, typer.Option("--json", help="Write every number to this file.")]
