"""Whole runs of vLLM's engine on the CPU, which has its first model runner."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from knockon.bench.export_folder import export
from knockon.bench.random_checkpoint import RandomCheckpoint
from knockon.bench.vllm.by_hand import chains_alike, rollout_by_hand
from knockon.bench.vllm.run import VllmAnswer, VllmRun, run_vllm
from knockon.engine.llm import LLM
from knockon.engine.sampling_params import SamplingParams
from knockon.integrations.vllm.versions import SUPPORTED, installed_version
from knockon.models import catalog
from knockon.rollout import DominoRollout

pytest.importorskip("vllm", reason="vLLM is not installed here (docs/vllm.md)")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(
        installed_version() not in SUPPORTED,
        reason="this vLLM is not one of those that are supported",
    ),
    pytest.mark.skipif(
        torch.cuda.is_available(), reason="on a GPU benchmarks/vllm_h200.sh does the same, and more"
    ),
]
ON_A_CPU = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


def alone_and_drafted(folder: Path, run: VllmRun, draft: Path) -> tuple[VllmAnswer, VllmAnswer]:
    """The target alone, and with ``draft``, its blocks recorded."""
    with_draft = replace(run, draft=str(draft), record=True)
    return (
        run_vllm(run, folder / "alone", ON_A_CPU),
        run_vllm(with_draft, folder / "drafted", ON_A_CPU),
    )


@pytest.mark.parametrize(
    ("architecture", "shift_label"), [("DominoDraftModel", True), ("DFlashDraftModel", False)]
)
def test_a_random_drafter_changes_no_token_and_proposes_the_rollouts(
    tmp_path, architecture, shift_label
):
    """In FP32, blocks of both label conventions under both published architecture names."""
    sizes = RandomCheckpoint(heads=2, kv_heads=2, head_dim=64, shift_label=shift_label)
    target, draft = sizes.save(tmp_path)
    config = json.loads((draft / "config.json").read_text())
    (draft / "config.json").write_text(json.dumps(config | {"architectures": [architecture]}))
    prompts = [[5, 6, 7], [100, 200, 300, 400, 17], [9] * 40]
    run = VllmRun(
        str(target), prompts, max_tokens=24, dtype="float32", max_model_len=128, eager=True
    )
    alone, drafted = alone_and_drafted(tmp_path, run, draft)
    assert not alone.blocks and alone.drafts == 0
    assert drafted.tokens == alone.tokens
    same, total = chains_alike(drafted, rollout_by_hand(target, draft, torch.float32))
    assert same == total >= 60


def test_the_shipped_drafter_is_accepted_and_changes_no_token(tmp_path, smollm2_path):
    """SmolLM2 in BF16; the second and third prompt meet the first in vLLM's prefix cache."""
    draft = catalog.resolve("smollm2-135m-domino")
    target = export(str(smollm2_path), tmp_path / "target")
    question = [1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198]
    prompts = [question, question * 5, question * 3]
    run = VllmRun(
        str(target),
        prompts,
        max_tokens=24,
        eager=True,
        engine={"enable_prefix_caching": True},
        sampling={"ignore_eos": True},
    )
    alone, drafted = alone_and_drafted(tmp_path, run, draft)
    assert drafted.tokens == alone.tokens
    assert drafted.accept_length > 1.5
    same, total = chains_alike(drafted, rollout_by_hand(target, draft, torch.bfloat16))
    # vLLM multiplies by its own BF16 head: where it rounds another way, a near-tie may turn.
    assert same >= 0.9 * total > 10


def test_every_block_is_drafted_as_knockons_engine_drafts_it(tmp_path, smollm2_path, monkeypatch):
    """In FP32: the same rows out of the backbone at every step, hence the same accept lengths."""
    draft = catalog.resolve("smollm2-135m-domino")
    target = export(str(smollm2_path), tmp_path / "target")
    prompt = [1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198]
    run = VllmRun(
        str(target),
        [prompt],
        str(draft),
        max_tokens=24,
        dtype="float32",
        eager=True,
        record=True,
        sampling={"ignore_eos": True},
    )
    theirs = run_vllm(run, tmp_path / "vllm", ON_A_CPU).blocks

    ours: list[torch.Tensor] = []
    call = DominoRollout.__call__

    def recorded(self, hidden, *arguments, **options):
        ours.append(hidden.clone())
        return call(self, hidden, *arguments, **options)

    monkeypatch.setattr(DominoRollout, "__call__", recorded)
    engine = LLM(target, draft=draft, dtype="float32", max_model_len=512, verify_width=16)
    engine.generate([prompt], SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True))
    assert len(theirs) >= len(ours) >= 5
    for block, hidden in zip(theirs, ours, strict=False):
        torch.testing.assert_close(block["hidden"], hidden, rtol=1e-3, atol=1e-3)
