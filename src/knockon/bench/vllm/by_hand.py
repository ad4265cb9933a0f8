"""The rollout made out of a target's and a drafter's files, with nothing of vLLM's in between."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor

from knockon.bench.vllm.run import VllmAnswer
from knockon.drafters.config import parse_draft_config
from knockon.drafters.published_weights import sort_published
from knockon.errors import Refused
from knockon.models.safetensors_source import SafetensorsFolder
from knockon.parallel import SingleRank, VocabShard
from knockon.rollout import DominoHead, DominoRollout


def rollout_by_hand(
    target: Path,
    draft: Path,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    pool_size: int = 2048,
    implementation: str = "auto",
) -> DominoRollout:
    """A single-rank rollout over the folders' own weights.

    Args:
        target: a Hugging Face folder. draft: a Domino checkpoint in the published format.

    Raises:
        Refused: weights that do not fit the format, or a drafter without a Domino head.
    """
    config = parse_draft_config(json.loads((draft / "config.json").read_text()))
    if config.domino is None:
        raise Refused("dflash_config.projector_type", "dflash", "'domino'")
    source = SafetensorsFolder(draft)
    pairs = ((name, source.get(name)) for name in source.names())
    found = sort_published(pairs, config, str(draft)).head
    theirs = SafetensorsFolder(target)

    def put(tensor: Tensor) -> Tensor:
        return tensor.to(device, dtype)

    head = DominoHead(
        put(found["prefix_gru.weight_ih_l0"]),
        put(found["prefix_gru.weight_hh_l0"]),
        put(found["embed_proj.0.weight"]),
        put(found["embed_proj.2.weight"]),
        prefix_len=config.domino.prefix_len,
        shift_label=config.domino.shift_label,
    )
    embedding = put(theirs.get("model.embed_tokens.weight"))
    tied = "lm_head.weight" not in theirs.names()
    lm_head = embedding if tied else put(theirs.get("lm_head.weight"))
    shard = VocabShard.deal(len(embedding), 1, 0)
    return DominoRollout(
        head,
        embedding,
        lm_head,
        shard,
        SingleRank(),
        pool_size=pool_size,
        implementation=implementation,
    )


def chains_alike(answer: VllmAnswer, rollout: DominoRollout) -> tuple[int, int]:
    """Of the recorded blocks' chains, how many ``rollout`` gives too, and how many there are."""
    same = total = 0
    device = rollout.head.device
    for block in answer.blocks:
        tokens = block["tokens"]
        again = rollout(
            block["hidden"].to(device), block["bonus"].to(device), steps=tokens.shape[1]
        ).cpu()
        same += int(again.eq(tokens).all(-1).sum())
        total += len(tokens)
    return same, total
