"""A published checkpoint's chains are those of the specification read in FP64, block by block.

In FP32 and FP64 all of them; in BF16 all but those where the rounding of a base logit, or of a
tabulated gate, is larger than the margin.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from knockon.bench.agreement import (
    CONTRACT,
    UNROUNDED,
    Agreement,
    FilesAsWritten,
    LoadedRollout,
    compare,
    draft_blocks,
)
from knockon.bench.first_difference import BASE, SUMS, UNEXPLAINED, FirstDifference
from knockon.bench.random_checkpoint import RandomCheckpoint
from knockon.rollout.reference import base_logits, reference_rollout

BLOCKS = 1024
DTYPES = (torch.float64, torch.float32, torch.bfloat16)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return RandomCheckpoint().save(tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def shifted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return RandomCheckpoint(shift_label=True, seed=1).save(tmp_path_factory.mktemp("shifted"))


def agreements(
    target: Path, draft: Path, pool_size: int, blocks: int
) -> dict[tuple[torch.dtype, str], Agreement]:
    rollouts = [LoadedRollout(target, draft, dtype, pool_size) for dtype in DTYPES]
    z, bonus = draft_blocks(target, draft, blocks)
    found = compare(FilesAsWritten(target, draft), rollouts, z, bonus)
    return {(a.dtype, a.reading): a for a in found}


@pytest.mark.parametrize(
    ("kind", "pool_size", "blocks"),
    (("checkpoint", 0, BLOCKS), ("checkpoint", 2048, BLOCKS), ("shifted", 2048, 256)),
)
def test_chains_are_those_of_the_specification(
    kind: str, pool_size: int, blocks: int, request: pytest.FixtureRequest
) -> None:
    found = agreements(*request.getfixturevalue(kind), pool_size, blocks)
    for agreement in found.values():
        assert agreement.blocks == blocks
        assert agreement.proposals == blocks * 15
        assert agreement.smallest_lead >= 0
    for dtype in (torch.float64, torch.float32):
        for reading in (CONTRACT, UNROUNDED):
            agreement = found[dtype, reading]
            # No token was so nearly another that the order of a sum could have decided it.
            assert agreement.smallest_lead > 1e-5
            assert agreement.differing == 0, agreement.first_differences
    for reading in (CONTRACT, UNROUNDED):
        rounded = found[torch.bfloat16, reading]
        for difference in rounded.first_differences:
            check_explained(difference)
    assert len(found[torch.bfloat16, CONTRACT].first_differences) <= blocks // 100
    share = len(found[torch.bfloat16, UNROUNDED].first_differences) / blocks
    assert 0.02 < share < 0.2


def check_explained(difference: FirstDifference) -> None:
    assert difference.cause != UNEXPLAINED, difference
    assert difference.margin >= 0, difference
    if difference.cause != SUMS:
        assert difference.margin <= difference.moved, difference
    if difference.cause == BASE:  # each of the two was rounded by at most half a spacing
        assert difference.margin <= difference.spacing * (1 + 1e-6), difference


def test_the_pool_and_the_head_decide_many_of_these_chains(checkpoint: tuple[Path, Path]) -> None:
    """Equality above would mean little for chains that any rollout gives."""
    target, draft = checkpoint
    z, bonus = draft_blocks(target, draft, 256)
    whole, pooled = (
        LoadedRollout(target, draft, torch.float32, pool_size).propose(z, bonus)
        for pool_size in (0, 2048)
    )
    assert (whole != pooled).any(1).sum() > 64
    rows = FilesAsWritten(target, draft).rows(z)
    plain = (rows @ FilesAsWritten(target, draft).lm_head.t()).argmax(-1)
    assert torch.equal(whole[:, 0], plain[:, 0])
    assert (whole[:, 1:] != plain[:, 1:]).float().mean() > 0.5
    assert len(whole.unique()) > 300


def test_the_reading_is_the_plain_oracles(checkpoint: tuple[Path, Path]) -> None:
    target, draft = checkpoint
    files = FilesAsWritten(target, draft)
    z, bonus = draft_blocks(target, draft, 4)
    rows = files.rows(z)
    for pool_size in (0, 2048):
        base = base_logits(files.lm_head, rows)
        read = files.reference(torch.float64).read(rows, bonus, base, pool_size)
        plain = reference_rollout(
            files.head, files.embedding, files.lm_head, z, bonus, 15, pool_size
        )
        assert torch.equal(read.tokens, plain)


def test_a_head_that_is_not_the_checkpoints_is_unexplained(
    checkpoint: tuple[Path, Path], tmp_path: Path
) -> None:
    target, draft = checkpoint
    weights = load_file(draft / "model.safetensors")
    weights["prefix_gru.weight_hh_l0"] *= 1.02
    (tmp_path / "config.json").write_text((draft / "config.json").read_text())
    save_file(weights, tmp_path / "model.safetensors")
    z, bonus = draft_blocks(target, draft, 128)
    other = LoadedRollout(target, tmp_path, torch.bfloat16, 0)
    contract, _ = compare(FilesAsWritten(target, draft), [other], z, bonus)
    causes = [difference.cause for difference in contract.first_differences]
    assert causes.count(UNEXPLAINED) > 10


def test_the_checkpoint_is_in_the_published_format(checkpoint: tuple[Path, Path]) -> None:
    _, draft = checkpoint
    config = json.loads((draft / "config.json").read_text())
    assert config["architectures"] == ["DominoDraftModel"]
    assert config["dflash_config"]["projector_type"] == "domino"
    names = set(load_file(draft / "model.safetensors"))
    assert {"fc.weight", "prefix_gru.weight_ih_l0", "embed_proj.2.weight"} <= names
