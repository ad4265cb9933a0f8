"""``make demo``: one model answers a handful of prompts, alone and with Domino, side by side."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from knockon.bench.speed import Run, run_prompts
from knockon.engine.llm import LLM
from knockon.engine.sampling_params import SamplingParams
from knockon.errors import KnockonError

MODEL = "smollm2-135m"
DRAFT = "smollm2-135m-domino"
QUESTIONS = (
    "A baker sells 12 muffins in the morning and twice as many in the afternoon. "
    "Each muffin costs 3 dollars. How much money does the baker make in a day?",
    "Tom reads 15 pages a day from Monday to Friday and 30 pages a day on the weekend. "
    "How many pages does he read in four weeks?",
    "Write a Python function that returns the sum of the even numbers in a list.",
    "Explain in a few sentences why the sky is blue.",
    "Give me three tips for learning a new language.",
)
NEW_TOKENS = 128


def main() -> None:
    """Print each answer's speed with and without Domino, and whether the tokens are the same."""
    console = Console()
    prompts = [[{"role": "user", "content": question}] for question in QUESTIONS]
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS)
    alone, domino = Run("target alone"), Run("with Domino")
    console.print(f"Loading {MODEL}, and once more with {DRAFT}")
    with LLM(MODEL) as target, LLM(MODEL, draft=DRAFT) as drafted:
        both = ((alone, target), (domino, drafted))
        for _, llm in both:
            llm.generate(prompts[:1], SamplingParams(temperature=0.0, max_tokens=8))  # warm up
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        with Progress(*columns, console=console, transient=True) as progress:
            task = progress.add_task("  prompts answered twice", total=len(prompts))
            # In turn, so that what else the machine does falls on both.
            for _ in zip(*(run_prompts(*each, prompts, params) for each in both), strict=True):
                progress.advance(task)
    console.print()
    for question, text in zip(QUESTIONS, domino.texts, strict=True):
        console.print(f"[bold]> {question}[/bold]\n{text.strip()}\n", highlight=False)
    table = Table(title="Greedy, batch 1, this CPU; output tokens per second, prefill included")
    table.add_column("prompt", no_wrap=True)
    for heading in ("tokens", "alone", "Domino", "speed-up", "same ids"):
        table.add_column(heading, justify="right", no_wrap=True)
    for i, question in enumerate(QUESTIONS):
        count = len(domino.tokens[i])
        table.add_row(
            question[:24] + "…",
            str(count),
            f"{len(alone.tokens[i]) / alone.seconds[i]:.1f}",
            f"{count / domino.seconds[i]:.1f}",
            f"{alone.seconds[i] / domino.seconds[i]:.2f}x",
            "yes" if alone.tokens[i] == domino.tokens[i] else "no",
        )
    ratio = domino.tokens_per_second / alone.tokens_per_second
    table.add_section()
    table.add_row(
        "all",
        str(sum(map(len, domino.tokens))),
        f"{alone.tokens_per_second:.1f}",
        f"{domino.tokens_per_second:.1f}",
        f"{ratio:.2f}x",
        f"{domino.identical_to(alone)} of {len(QUESTIONS)}",
    )
    console.print(table)
    console.print(
        f"Accept length {domino.mean_accept_length:.2f}: tokens gained each time the target "
        "verifies a block, its own next token included."
    )


if __name__ == "__main__":
    try:
        main()
    except KnockonError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
