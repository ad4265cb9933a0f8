"""What an engine is asked to be; checked once, before anything is loaded."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from knockon.engine.width import AUTO
from knockon.errors import Refused

DTYPES = ("auto", "bfloat16", "float16", "float32", "float64")
EXCHANGES = ("auto", "full", "compact")
DRAFT_HEAD_DTYPES = ("auto", "fp8")
STATE_DTYPES = ("auto", "float32", "bfloat16")
ALGORITHMS = ("DFLASH", "MTP", "NONE")
# Proposals of an MTP head where nobody says how many.
DEFAULT_MTP_STEPS = 3
KV_DTYPES = ("auto", "fp8_e4m3")
LINEAR_ATTENTION = ("auto", "torch", "fla")
_OPTIONAL_COUNTS = (
    *("max_batch_size", "kv_memory", "prefill_chunk"),
    *("cuda_graph_max_bs", "max_mamba_cache_size"),
)


@dataclass(frozen=True)
class EngineConfig:
    """Settings of an engine; the same on every rank.

    Args:
        model: catalogue name, Hugging Face folder, GGUF file or hub id of the target.
        draft: the drafter's folder, catalogue name or hub id; ``None`` decodes without speculation.
        tp_size: ranks that share the model.
        dtype: of weights, activations and KV; ``"auto"`` takes what the device is fast in.
        device: ``"cpu"``, ``"cuda"``, or ``"auto"``: a GPU where there is one.
        verify_width: positions the target verifies at a time, 1 (no speculation) to the drafter's
            block size; ``"auto"`` chooses each step (:class:`~knockon.engine.width.AdaptiveWidth`);
            ``None`` takes :func:`default_verify_width`.
        speculative_algorithm: ``DFLASH`` (Domino's drafters included) or ``MTP``, to be held to;
            ``MTP`` without a draft takes the target's own head; ``NONE`` leaves a draft aside;
            ``None`` for what the draft says it is.
        speculative_num_steps: proposals of an MTP head, ``S``: it verifies ``S + 1`` positions at
            most; ``None`` for one less than the verify width, or 3.
        speculative_domino_candidate_pool_size: Domino's ``K``; 0 scores the whole vocabulary.
        speculative_domino_exchange: how base logits cross ranks: ``auto``, ``full`` or ``compact``.
        speculative_draft_head_dtype: of the LM head that proposes: ``auto`` for the target's own,
            ``fp8`` for a copy of it in FP8. The target's own head always verifies.
        max_model_len: positions a request may reach; ``None`` for the model's own limit or what
            the KV memory holds, whichever is less.
        max_batch_size: requests computed at once; ``None`` for 32 on CPUs and 64 on GPUs.
        page_size: positions a KV page.
        kv_memory: bytes of target and draft KV together, over all ranks; ``None`` for 512 MiB on
            CPUs, and on GPUs for what ``mem_fraction_static`` leaves.
        kv_cache_dtype: of the target's keys and values: ``auto`` for ``dtype``, or ``fp8_e4m3``,
            unscaled: half the memory of BF16 and rounded, so answers are another model's, the
            same with a drafter and without. A drafter's own KV keeps ``dtype``.
        mem_fraction_static: on GPUs, the part of the memory that weights and KV may take together.
        prefill_chunk: prompt tokens run in one step; ``None`` for 512 on CPUs and 4096 on GPUs.
        prefix_cache: whether KV of earlier prompts is used again.
        max_mamba_cache_size: states of recurrent layers, where the target has such: one a request
            computed at once, the others checkpoints of the prefix cache; ``None`` for twice
            ``max_batch_size``.
        mamba_ssm_dtype: what those states are kept in: ``float32``, ``bfloat16``, or ``auto``:
            FP32, FP64 where the model is computed in it.
        attention_backend: ``"torch"``, ``"triton"``, or ``"auto"``: Triton's on GPUs.
        linear_attn_backend: what takes prompts through recurrent layers: ``"torch"``, ``"fla"``
            (flash-linear-attention's kernels, of the extra ``cuda``), or ``"auto"``: those on GPUs
            that have them, where ``dtype`` has 16 bits. Decoding and verifying have kernels of
            their own.
        overlap_schedule: whether a step is launched before the tokens of the one before it have
            been read; ``None`` for where attention reads lengths on the device.
        cuda_graph: whether whole steps are captured as CUDA graphs; it takes ``overlap_schedule``.
        cuda_graph_max_bs: the largest batch that has a graph; larger ones launch their kernels one
            by one. ``None`` for ``max_batch_size``.

    Raises:
        Refused: a value of the wrong type or out of range.
    """

    model: str
    draft: str | None = None
    tp_size: int = 1
    dtype: str = "auto"
    device: str = "auto"
    verify_width: int | str | None = None
    speculative_algorithm: str | None = None
    speculative_num_steps: int | None = None
    speculative_domino_candidate_pool_size: int = 2048
    speculative_domino_exchange: str = "auto"
    speculative_draft_head_dtype: str = "auto"
    max_model_len: int | None = None
    max_batch_size: int | None = None
    page_size: int = 16
    kv_memory: int | None = None
    kv_cache_dtype: str = "auto"
    mem_fraction_static: float = 0.88
    prefill_chunk: int | None = None
    prefix_cache: bool = True
    max_mamba_cache_size: int | None = None
    mamba_ssm_dtype: str = "auto"
    attention_backend: str = "auto"
    linear_attn_backend: str = "auto"
    overlap_schedule: bool | None = None
    cuda_graph: bool = True
    cuda_graph_max_bs: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.model, str) or not self.model:
            raise Refused("model", self.model, "a model's name or path")
        if self.draft is not None and (not isinstance(self.draft, str) or not self.draft):
            raise Refused("draft", self.draft, "a drafter's name or path, or None")
        if self.dtype not in DTYPES:
            raise Refused("dtype", self.dtype, f"one of {', '.join(DTYPES)}")
        if self.device not in ("auto", "cpu", "cuda"):
            raise Refused("device", self.device, "auto, cpu or cuda")
        if self.attention_backend not in ("auto", "torch", "triton"):
            raise Refused("attention_backend", self.attention_backend, "auto, torch or triton")
        if self.linear_attn_backend not in LINEAR_ATTENTION:
            wanted = f"one of {', '.join(LINEAR_ATTENTION)}"
            raise Refused("linear_attn_backend", self.linear_attn_backend, wanted)
        fraction = self.mem_fraction_static
        if (
            isinstance(fraction, bool)
            or not isinstance(fraction, int | float)
            or not 0 < fraction < 1
        ):
            raise Refused("mem_fraction_static", fraction, "a number between 0 and 1")
        if self.speculative_domino_exchange not in EXCHANGES:
            raise Refused(
                "speculative_domino_exchange",
                self.speculative_domino_exchange,
                f"one of {', '.join(EXCHANGES)}",
            )
        if self.speculative_algorithm not in (None, *ALGORITHMS):
            wanted = f"one of {', '.join(ALGORITHMS)}"
            raise Refused("speculative_algorithm", self.speculative_algorithm, wanted)
        if self.speculative_num_steps is not None:
            _at_least("speculative_num_steps", self.speculative_num_steps, 1)
            if not self.drafts and self.speculative_algorithm != "NONE":
                wanted = "none where no draft is given"
                raise Refused("speculative_num_steps", self.speculative_num_steps, wanted)
        _refuse_draft_head(self)
        if self.kv_cache_dtype not in KV_DTYPES:
            raise Refused("kv_cache_dtype", self.kv_cache_dtype, f"one of {', '.join(KV_DTYPES)}")
        for name in ("tp_size", "page_size"):
            _at_least(name, getattr(self, name), 1)
        if self.mamba_ssm_dtype not in STATE_DTYPES:
            wanted = f"one of {', '.join(STATE_DTYPES)}"
            raise Refused("mamba_ssm_dtype", self.mamba_ssm_dtype, wanted)
        for name in _OPTIONAL_COUNTS:
            if getattr(self, name) is not None:
                _at_least(name, getattr(self, name), 1)
        _at_least(
            "speculative_domino_candidate_pool_size",
            self.speculative_domino_candidate_pool_size,
            0,
        )
        if self.verify_width is not None:
            if isinstance(self.verify_width, str):
                if self.verify_width != AUTO:
                    raise Refused("verify_width", self.verify_width, f"an integer or {AUTO!r}")
            else:
                _at_least("verify_width", self.verify_width, 1)
            if not self.drafts and self.verify_width != 1:
                raise Refused("verify_width", self.verify_width, "1 where no draft is given")
        if self.max_model_len is not None:
            _at_least("max_model_len", self.max_model_len, 2)

    @property
    def drafts(self) -> bool:
        """Whether a drafter is asked for."""
        if self.speculative_algorithm == "NONE":
            return False
        return self.draft is not None or self.speculative_algorithm == "MTP"

    def mtp_steps(self) -> int:
        """Proposals of an MTP head, as asked for, or as the verify width implies."""
        if self.speculative_num_steps is not None:
            return self.speculative_num_steps
        if isinstance(self.verify_width, int) and self.verify_width > 1:
            return self.verify_width - 1
        return DEFAULT_MTP_STEPS

    def replace(self, **changes: Any) -> EngineConfig:
        """A copy with some settings changed, checked again."""
        return dataclasses.replace(self, **changes)


def _refuse_draft_head(config: EngineConfig) -> None:
    field, found = "speculative_draft_head_dtype", config.speculative_draft_head_dtype
    if found not in DRAFT_HEAD_DTYPES:
        raise Refused(field, found, f"one of {', '.join(DRAFT_HEAD_DTYPES)}")
    if found == "auto":
        return
    if not config.drafts:
        raise Refused(field, found, "auto where no draft is given")


def _at_least(name: str, value: object, low: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise Refused(name, value, f"an integer of at least {low}")


def check_verify_width(width: int, block_size: int) -> int:
    """Hold a verify width against the drafter's block.

    Raises:
        Refused: a width above the block size.
    """
    if width > block_size:
        raise Refused("verify_width", width, f"1 to the drafter's block_size {block_size}")
    return width


def default_verify_width(block_size: int, device: str) -> int:
    """The width used where none is asked for.

    A GPU verifies a whole block in about the time of one token. A CPU is soon limited by
    arithmetic: eight positions were best for the shipped drafter (benchmarks/cpu_generation.py).
    """
    return block_size if device == "cuda" else min(block_size, 8)
