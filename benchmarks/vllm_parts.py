"""The pieces of vllm_h200.py: prompts, near ties, Knockon's own accept length, Qwen3-8B's sizes."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from knockon.bench.vllm.run import VllmRun, run_vllm
from knockon.models.tokenizer import load_tokenizer

# One rounding of a BF16 logit between 16 and 32, twice: how far apart two sums may be rounded.
NEAR = 0.25
LAYERS, ACCEPT_LENGTH = 36, 6.878


@dataclass(frozen=True)
class Prompts:
    """Chats of one turn, as token ids."""

    ids: list[list[int]]

    @classmethod
    def read(cls, file: Path, tokenizer: Path, count: int) -> Prompts:
        """``prompt`` of every line, at most ``count``."""
        lines = [json.loads(line) for line in file.read_text().splitlines()][:count]
        encode = load_tokenizer(tokenizer)
        return cls(
            [
                encode.apply_chat_template(
                    [{"role": "user", "content": line["prompt"]}],
                    add_generation_prompt=True,
                    return_dict=True,
                )["input_ids"]
                for line in lines
            ]
        )


def differences(
    run: VllmRun, alone: list[list[int]], drafted: list[list[int]], work: Path
) -> list[dict[str, Any]]:
    """Where answers first differ, and by how much the target there prefers the one token.

    The target is asked again, with the text up to there as its prompt.
    """
    gaps = []
    for answer, (theirs, ours) in enumerate(zip(alone, drafted, strict=True)):
        if theirs != ours:
            pairs = enumerate(zip(theirs, ours, strict=False))
            at = next((i for i, (a, b) in pairs if a != b), min(len(theirs), len(ours)))
            gaps.append((answer, at))
    if not gaps:
        return []
    prompts = [[*run.prompts[answer], *alone[answer][:at]] for answer, at in gaps]
    again = run_vllm(replace(run, prompts=prompts, max_tokens=1, sampling={"logprobs": 20}), work)
    found = []
    for (answer, at), rows in zip(gaps, again.logprobs, strict=True):
        pair = [t[answer][at] if at < len(t[answer]) else None for t in (alone, drafted)]
        values = [None if token is None else rows[0].get(token) for token in pair]
        margin = None if None in values else values[0] - values[1]
        found.append(
            {
                "answer": answer,
                "at": at,
                "tokens": pair,
                "margin": margin,
                "near_tie": margin is not None and abs(margin) <= NEAR,
            }
        )
    return found


def accept_length_of_knockon(gguf: Path, draft: Path, run: VllmRun) -> float:
    """Mean accept length of Knockon's engine on the same prompts, at the same verify width.

    In a process of its own, so that its memory is given back.
    """
    with get_context("spawn").Pool(1) as pool:
        return pool.apply(_knockon, (gguf, draft, run))


def _knockon(gguf: Path, draft: Path, run: VllmRun) -> float:
    from knockon.engine.llm import LLM
    from knockon.engine.sampling_params import SamplingParams

    engine = LLM(
        gguf,
        draft=draft,
        dtype=run.dtype,
        max_model_len=run.max_model_len,
        verify_width=run.proposals + 1,
    )
    params = SamplingParams(temperature=0.0, max_tokens=run.max_tokens)
    outputs = engine.generate([list(prompt) for prompt in run.prompts], params)
    lengths = [length for output in outputs for length in output.metrics.accept_lengths]
    return sum(lengths) / len(lengths)


def qwen3_8b_folders(work: Path) -> dict[str, Path]:
    """Configurations without weights: vLLM makes them up (``load_format="dummy"``)."""
    sizes = {
        "model_type": "qwen3",
        "dtype": "bfloat16",
        "hidden_act": "silu",
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "max_position_embeddings": 40960,
    }
    target = sizes | {
        "architectures": ["Qwen3ForCausalLM"],
        "num_hidden_layers": LAYERS,
        "tie_word_embeddings": False,
        "eos_token_id": 151645,
    }
    dflash = {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]}
    draft = sizes | {
        "architectures": ["DFlashDraftModel"],
        "num_hidden_layers": 5,
        "layer_types": ["full_attention"] * 5,
        "block_size": 16,
        "num_target_layers": LAYERS,
    }
    domino = dflash | {
        "projector_type": "domino",
        "pure_draft_prefix_len": 1,
        "gru_hidden_dim": 1024,
        "emb_dim": 256,
        "shift_label": True,
    }
    configs = {
        "target": target,
        "dflash": draft | {"dflash_config": dflash},
        "domino": draft | {"dflash_config": domino},
    }
    folders = {}
    for name, config in configs.items():
        folders[name] = work / name
        folders[name].mkdir(parents=True, exist_ok=True)
        (folders[name] / "config.json").write_text(json.dumps(config, indent=1))
    return folders


def synthetic_step(
    folders: dict[str, Path], name: str, concurrency: int, work: Path
) -> dict[str, Any]:
    """Milliseconds of a step: all requests are alike, so each step verifies one block of each."""
    run = VllmRun(
        str(folders["target"]),
        [[100 + i, *range(1000, 1255)] for i in range(concurrency)],
        draft=str(folders[name]),
        max_tokens=512,
        concurrency=concurrency,
        max_model_len=1024,
        repeats=2,
        speculative={
            "rejection_sample_method": "synthetic",
            "synthetic_acceptance_length": ACCEPT_LENGTH,
        },
        engine={"load_format": "dummy", "gpu_memory_utilization": 0.6},
        sampling={"ignore_eos": True},
    )
    found = run_vllm(run, work)
    steps = found.drafts / concurrency
    return {
        "drafter": name,
        "concurrency": concurrency,
        "step_ms": 1e3 * sum(found.seconds) / steps,
        "tokens_per_second": found.tokens_per_second,
        "accept_length": found.accept_length,
    }
