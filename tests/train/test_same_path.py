"""What is trained is what is served: the engine's drafter proposes what the evaluation counted."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import LlamaForCausalLM

from knockon.drafters.load import load_drafter
from knockon.layers.attention import PagedKV, plan_block
from knockon.layers.attention.sdpa import SdpaBackend
from knockon.models.target import load_target
from knockon.parallel import SingleRank
from knockon.train.drafter_module import DraftModule
from knockon.train.evaluate import propose_everywhere
from knockon.train.export import export
from knockon.train.frozen_target import FrozenTarget
from knockon.train.objective import Anchors
from knockon.train.warm_start import load_module


def test_exported_drafter_proposes_the_same_chain_in_the_engine(
    llama: LlamaForCausalLM,
    target: FrozenTarget,
    module: DraftModule,
    draft_dict: dict,
    tmp_path: Path,
) -> None:
    with torch.no_grad():
        module.embed_proj[2].weight.normal_(std=2.0)
    llama.save_pretrained(tmp_path / "target")
    export(module, draft_dict, tmp_path / "draft", "card")
    served = load_target(tmp_path / "target", torch.float32, SingleRank())
    drafter = load_drafter(tmp_path / "draft", served, SdpaBackend(), 128, pool_size=0)
    drafter.bind_kv(128)

    torch.manual_seed(4)
    tokens = torch.randint(3, 96, (1, 24))
    pages = torch.arange(1, 8)[None]
    kv = [PagedKV.allocate(128, 1, 16, torch.float32) for _ in range(4)]
    plan = plan_block(pages, 16, torch.tensor([0]), 24, 24)
    output = served(tokens, plan, kv, drafter.feature_layers)
    assert output.features is not None
    drafter.observe(output.features, tokens, plan)

    again = load_module(tmp_path / "draft", target.config)
    anchors = Anchors(torch.tensor([[4, 11, 23]]), torch.ones(1, 3, dtype=torch.bool))
    ours = propose_everywhere(again, target, tokens, anchors, again.config.target_layer_ids)
    for block, anchor in enumerate([4, 11, 23]):
        rows = plan_block(pages, 16, torch.tensor([anchor]), 4, anchor + 4)
        theirs = drafter.propose(tokens[:, anchor], rows, 3)
        assert theirs.tolist() == ours[:, block].tolist()
        # Proposing overwrote the draft KV behind the anchor; later anchors need it back.
        drafter.observe(output.features, tokens, plan)
