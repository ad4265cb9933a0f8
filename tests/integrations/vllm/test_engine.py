"""Whole runs of vLLM's engine on the CPU: its first model runner, one rank, one request per row."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from knockon.bench.export_folder import export
from knockon.bench.random_checkpoint import RandomCheckpoint
from knockon.integrations.vllm.versions import SUPPORTED, installed_version
from knockon.models import catalog
from knockon.parallel import SingleRank, VocabShard
from knockon.rollout import DominoHead, DominoRollout

pytest.importorskip("vllm", reason="vLLM is not installed here (docs/vllm.md)")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(
        installed_version() not in SUPPORTED,
        reason="this vLLM is not one of those that are supported",
    ),
    pytest.mark.skipif(
        not hasattr(torch.ops, "_C") and torch.cuda.is_available(),
        reason="benchmarks/vllm_h200.py runs the same on a GPU",
    ),
]
PROGRAM = Path(__file__).with_name("engine_program.py")


def generate(folder: Path, **request: Any) -> list[dict[str, Any]]:
    """The target alone, then each draft: see engine_program.py."""
    asked, answer = folder / "request.json", folder / "answer.pt"
    asked.write_text(json.dumps(request))
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(asked), str(answer)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    found: list[dict[str, Any]] = torch.load(answer)
    return found


def by_hand(target: Path, draft: Path, dtype: torch.dtype, pool_size: int = 2048) -> DominoRollout:
    """The rollout out of the checkpoints' files, without vLLM."""
    theirs = load_file(target / "model.safetensors")
    ours: dict[str, torch.Tensor] = {}
    for file in draft.glob("*.safetensors"):
        ours |= load_file(file)
    dflash = json.loads((draft / "config.json").read_text())["dflash_config"]
    head = DominoHead(
        ours["prefix_gru.weight_ih_l0"].to(dtype),
        ours["prefix_gru.weight_hh_l0"].to(dtype),
        ours["embed_proj.0.weight"].to(dtype),
        ours["embed_proj.2.weight"].to(dtype),
        prefix_len=dflash["pure_draft_prefix_len"],
        shift_label=dflash["shift_label"],
    )
    embedding = theirs["model.embed_tokens.weight"].to(dtype)
    lm_head = theirs.get("lm_head.weight", embedding).to(dtype)
    shard = VocabShard.deal(len(embedding), 1, 0)
    return DominoRollout(head, embedding, lm_head, shard, SingleRank(), pool_size=pool_size)


def test_a_random_drafter_changes_no_token_and_proposes_the_rollouts(tmp_path):
    """Blocks of both label conventions and both published architecture names, in FP32."""
    sizes = RandomCheckpoint(heads=2, kv_heads=2, head_dim=64, shift_label=True)
    target, shifted = sizes.save(tmp_path / "shifted")
    _, unshifted = replace(sizes, shift_label=False).save(tmp_path / "unshifted")
    config = json.loads((unshifted / "config.json").read_text())
    config["architectures"] = ["DFlashDraftModel"]
    (unshifted / "config.json").write_text(json.dumps(config))
    alone, *drafted = generate(
        tmp_path,
        target=str(target),
        dtype="float32",
        drafts=[None, str(shifted), str(unshifted)],
        prompts=[[5, 6, 7], [100, 200, 300, 400, 17], [9] * 40],
        max_tokens=24,
        tokens=15,
    )
    assert not alone["blocks"]
    for draft, found in zip((shifted, unshifted), drafted, strict=True):
        assert found["tokens"] == alone["tokens"]
        rollout = by_hand(target, draft, torch.float32)
        assert len(found["blocks"]) >= 20
        for block in found["blocks"]:
            again = rollout(block["hidden"], block["bonus"], 15)
            assert again.tolist() == block["tokens"].tolist()
    first = [block["tokens"].tolist() for found in drafted for block in found["blocks"][:1]]
    assert first[0] != first[1]


def test_the_shipped_drafter_is_accepted_and_changes_no_token(tmp_path, smollm2_path):
    """SmolLM2 in BF16, on a prompt with a prefix in vLLM's cache, too."""
    draft = catalog.resolve("smollm2-135m-domino")
    target = export(str(smollm2_path), tmp_path / "target")
    question = [1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198]
    alone, found = generate(
        tmp_path,
        target=str(target),
        dtype="bfloat16",
        drafts=[None, str(draft)],
        prompts=[question, question * 5, question[:3] + question],
        max_tokens=32,
        tokens=15,
        prefix_caching=True,
        max_model_len=512,
    )
    assert found["tokens"] == alone["tokens"]
    assert 1 + found["accepted"] / found["drafts"] > 1.5
    rollout = by_hand(target, draft, torch.bfloat16)
    blocks = [
        (rollout(block["hidden"], block["bonus"], 15), block["tokens"]) for block in found["blocks"]
    ]
    same = sum(int(again.eq(tokens).all(-1).sum()) for again, tokens in blocks)
    total = sum(len(tokens) for _, tokens in blocks)
    # vLLM multiplies by its own BF16 head: where it rounds another way, a near-tie may turn.
    assert same >= 0.9 * total
