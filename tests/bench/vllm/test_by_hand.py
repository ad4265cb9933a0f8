from __future__ import annotations

import torch

from knockon.bench.random_checkpoint import RandomCheckpoint
from knockon.bench.vllm.by_hand import chains_alike, rollout_by_hand
from knockon.drafters.load import load_drafter
from knockon.layers.attention.sdpa import SdpaBackend
from knockon.models.target import load_target
from knockon.parallel import SingleRank
from tests.bench.vllm.test_run import answer


def test_it_chooses_what_the_engines_drafter_does(tmp_path):
    folders = RandomCheckpoint(vocab_size=331, shift_label=True).save(tmp_path)
    rollout = rollout_by_hand(*folders, torch.float32, pool_size=50)
    target = load_target(folders[0], torch.float32, SingleRank())
    drafter = load_drafter(folders[1], target, SdpaBackend(), 256, pool_size=50)
    hidden = torch.randn(3, 16, 64, generator=torch.Generator().manual_seed(1))
    bonus = torch.tensor([0, 7, 330])
    tokens = rollout(hidden, bonus)
    assert drafter.rollout(hidden, bonus).equal(tokens)

    block = {"hidden": hidden, "bonus": bonus, "tokens": tokens}
    assert chains_alike(answer(blocks=[block, block]), rollout) == (6, 6)
    other = tokens.clone()
    other[1, 4] += 1
    assert chains_alike(answer(blocks=[block | {"tokens": other}]), rollout) == (2, 3)
