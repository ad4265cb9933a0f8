"""Options that several commands share: the model, the drafter, ranks, sampling."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from knockon.engine.llm import LLM

ModelArgument = Annotated[
    str, typer.Argument(help="Catalogue name, Hugging Face folder, GGUF file or hub id.")
]
Draft = Annotated[
    str | None,
    typer.Option(help="Drafter made for that model, named likewise. None: no speculation."),
]
TpSize = Annotated[int, typer.Option(help="Ranks that share the model, one process each.")]
Dtype = Annotated[
    str, typer.Option(help="auto, bfloat16, float16, float32 or float64. See `knockon doctor`.")
]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
VerifyWidth = Annotated[
    str | None,
    typer.Option(
        "--verify-width",
        "--speculative-num-draft-tokens",
        "--speculative-dflash-block-size",
        metavar="INTEGER|auto",
        help="Positions verified at a time, 1 to the drafter's block size; auto: the fastest of "
        "1, 4, 8, 12, 16 each step, by measured step times and acceptance.",
        show_default="by device",
    ),
]
Algorithm = Annotated[
    str | None,
    typer.Option(
        "--speculative-algorithm",
        help="DFLASH (Domino included) or MTP, to be held to; MTP without --draft takes the "
        "target's own head; NONE leaves a draft aside.",
        show_default="what the draft is",
    ),
]
NumSteps = Annotated[
    int | None,
    typer.Option(
        "--speculative-num-steps",
        help="Proposals of an MTP head; it verifies one position more.",
        show_default="verify width less one, or 3",
    ),
]
PoolSize = Annotated[
    int,
    typer.Option(
        "--speculative-domino-candidate-pool-size",
        help="Domino's candidate pool K; 0 scores the whole vocabulary.",
    ),
]
Exchange = Annotated[
    str,
    typer.Option(
        "--speculative-domino-exchange",
        help="How base logits cross ranks: auto, full or compact.",
    ),
]
DraftHeadDtype = Annotated[
    str,
    typer.Option(
        "--speculative-draft-head-dtype",
        help="LM head that proposes: auto, the target's own, or fp8, a copy beside it.",
    ),
]
LinearAttention = Annotated[
    str,
    typer.Option(
        "--linear-attn-backend",
        help="What takes prompts through recurrent layers: torch, fla (flash-linear-attention's "
        "kernels, by pip install fla-core), or auto: fla on GPUs that have it, for 16-bit dtypes. "
        " Decoding and verifying have kernels of their own.",
    ),
]
StateCount = Annotated[
    int | None,
    typer.Option(
        "--max-mamba-cache-size",
        help="States of recurrent layers: one a sequence computed at once, the others kept for "
        "later prompts.",
        show_default="twice the sequences computed at once",
    ),
]
StateDtype = Annotated[
    str,
    typer.Option(
        "--mamba-ssm-dtype",
        help="What states of recurrent layers are kept in: auto (float32), float32 or bfloat16.",
    ),
]
CudaGraphMaxBs = Annotated[
    int | None,
    typer.Option(
        "--cuda-graph-max-bs",
        "--cuda-graph-max-bs-decode",
        help="On GPUs, the largest batch with a CUDA graph; larger ones run without.",
        show_default="every batch",
    ),
]
MaxModelLen = Annotated[
    int | None,
    typer.Option(help="Positions a request may reach.", show_default="the model's own limit"),
]
MaxTokens = Annotated[int, typer.Option(help="Most tokens to generate.")]
Temperature = Annotated[float, typer.Option(help="0 is greedy; 1 the model's own distribution.")]
TopP = Annotated[float, typer.Option(help="Keep the most probable tokens of this mass.")]
TopK = Annotated[int, typer.Option(help="Keep the k most probable tokens; 0 keeps all.")]
MinP = Annotated[float, typer.Option(help="Keep tokens this fraction as probable as the best.")]
Seed = Annotated[
    int | None, typer.Option(help="Fixes the noise of sampling.", show_default="a fresh one")
]
Stop = Annotated[
    list[str] | None,
    typer.Option(help="String that ends the text; may be given several times."),
]


def open_llm(
    model: str,
    draft: str | None,
    tp_size: int,
    dtype: str,
    device: str,
    verify_width: str | None,
    pool_size: int,
    exchange: str,
    draft_head_dtype: str,
    max_model_len: int | None,
    **more: Any,
) -> LLM:
    """Load a model as the options say."""
    from knockon.engine.llm import LLM

    return LLM(
        model,
        draft,
        tp_size,
        dtype,
        device=device,
        verify_width=parse_width(verify_width),
        speculative_domino_candidate_pool_size=pool_size,
        speculative_domino_exchange=exchange,
        speculative_draft_head_dtype=draft_head_dtype,
        max_model_len=max_model_len,
        **more,
    )


def parse_width(text: str | None) -> int | str | None:
    """A verify width as the engine takes it; what is no integer is left for it to judge."""
    if text is None:
        return None
    try:
        return int(text)
    except ValueError:
        return text
