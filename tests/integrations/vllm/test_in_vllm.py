"""The plugin under a real vLLM: registration, refusals and the diversion of its classes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from knockon.bench.random_checkpoint import RandomCheckpoint
from knockon.errors import Refused
from knockon.integrations.vllm import plugin, versions
from knockon.integrations.vllm.choice import prepare
from knockon.integrations.vllm.plugin import ARCHITECTURES, register
from knockon.parallel import SingleRank, VocabShard
from knockon.rollout import DominoHead, DominoRollout

vllm = pytest.importorskip("vllm", reason="vLLM is not installed here (docs/vllm.md)")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        versions.installed_version() not in versions.SUPPORTED,
        reason="this vLLM is not one of those that are supported",
    ),
]
SIZES = RandomCheckpoint(vocab_size=331, heads=2, kv_heads=2, head_dim=64, shift_label=True)


@pytest.fixture(scope="module", autouse=True)
def registered() -> None:
    register()


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> tuple[Path, Path]:
    return SIZES.save(tmp_path_factory.mktemp("tiny"))


def engine_config(target: Path, draft: Path, **speculative: Any) -> Any:
    """vLLM's own reading of what ``vllm serve`` would be asked."""
    from vllm.engine.arg_utils import EngineArgs

    asked = {"method": "dflash", "model": str(draft), "num_speculative_tokens": 15} | speculative
    args = EngineArgs(
        model=str(target),
        skip_tokenizer_init=True,
        max_model_len=128,
        enforce_eager=True,
        speculative_config=asked,
    )
    return args.create_engine_config()


@pytest.fixture(scope="module")
def config(folders) -> Any:
    return engine_config(*folders)


@pytest.fixture
def checkpoint(folders) -> Iterator[Path]:
    """The drafter's ``config.json``, to be changed."""
    file = folders[1] / "config.json"
    kept = file.read_text()
    yield file
    file.write_text(kept)


def test_the_architecture_is_registered_under_both_spellings():
    known = vllm.ModelRegistry.get_supported_archs()
    assert set(ARCHITECTURES) <= set(known)
    for name in ARCHITECTURES:
        found = vllm.ModelRegistry.models[name].load_model_cls()
        assert found.__module__ == "knockon.integrations.vllm.model"


def test_vllm_reads_the_checkpoint_as_ours(config):
    draft = config.speculative_config.draft_model_config
    assert draft.architectures == ["DFlashDominoDraftModel"]
    assert config.speculative_config.method == "dflash"


def test_under_an_unknown_version_the_checkpoint_is_refused_and_nothing_else(monkeypatch, caplog):
    monkeypatch.setattr(versions, "installed_version", lambda: "0.99.0")
    monkeypatch.setattr(plugin, "installed_version", lambda: "0.99.0")
    with caplog.at_level("WARNING", "vllm.knockon"):
        vllm_logger = plugin.logger.parent
        monkeypatch.setattr(vllm_logger, "propagate", True)
        register()
    assert "found '0.99.0', wanted one of 0.25.1, 0.32.0" in caplog.text
    for name in ARCHITECTURES:
        with pytest.raises(Refused, match=r"vllm version: found '0\.99\.0'"):
            vllm.ModelRegistry.models[name].load_model_cls()
    monkeypatch.undo()
    register()
    assert vllm.ModelRegistry.models[ARCHITECTURES[0]].load_model_cls()


def test_a_checkpoint_that_fits_is_prepared(config):
    settings = prepare(config)
    told = config.speculative_config.draft_model_config.hf_config.dflash_config
    assert settings.pool_size == 2048
    assert (told["mask_token_id"], told["target_layer_ids"], told["causal"]) == (1, [0], False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab_size": 330}, "draft vocab_size: found 330, wanted the target's 331"),
        ({"num_target_layers": 3}, "draft num_target_layers: found 3, wanted the target's 2"),
        ({"hidden_size": 128}, "draft hidden_size: found 128, wanted the target's 64"),
        ({"max_position_embeddings": 127}, "draft max_position_embeddings: found 127"),
        ({"block_size": 15}, "num_speculative_tokens: found 15, wanted at most"),
        ({"rope_theta": 5000.0}, "rope_theta as vLLM reads it: found 10000.0"),
        ({"dflash_config": {"shift_label": None}}, "shift_label: found None"),
        ({"dflash_config": {"projector_type": "causal_v5"}}, "projector_type: found 'causal_v5'"),
        ({"dflash_config": {"projector_type": "dflash"}}, "projector_type: found 'dflash'"),
        ({"dflash_config": {"mask_token_id": 331}}, "mask_token_id: found 331"),
        ({"dflash_config": {"target_layer_ids": [1]}}, "target_layer_ids: found 1"),
        ({"architectures": ["Qwen3ForCausalLM"]}, "architectures: found 'Qwen3ForCausalLM'"),
    ],
)
def test_a_wrong_checkpoint_is_refused_by_field(config, checkpoint, change, message):
    raw = json.loads(checkpoint.read_text())
    nested = raw["dflash_config"] | change.get("dflash_config", {})
    checkpoint.write_text(json.dumps(raw | change | {"dflash_config": nested}))
    with pytest.raises(Refused, match=message):
        prepare(config)


def test_a_setting_that_does_not_exist_is_refused(config, monkeypatch):
    monkeypatch.setenv("KNOCKON_VLLM_POOL", "512")
    with pytest.raises(Refused, match="KNOCKON_VLLM_POOL: found '512'"):
        prepare(config)


def test_both_runners_classes_give_ours_for_domino_and_themselves_for_dflash(
    folders, config, tmp_path
):
    from vllm.v1.spec_decode.dflash import DFlashProposer
    from vllm.v1.worker.gpu.spec_decode.dflash.speculator import DFlashSpeculator

    plain = tmp_path / "plain"
    plain.mkdir()
    raw = json.loads((folders[1] / "config.json").read_text())
    dflash = {k: raw["dflash_config"][k] for k in ("mask_token_id", "target_layer_ids")}
    raw |= {"architectures": ["DFlashDraftModel"], "dflash_config": dflash}
    (plain / "config.json").write_text(json.dumps(raw))
    plain_config = engine_config(folders[0], plain)
    classes = {DFlashProposer: "DominoProposer", DFlashSpeculator: "DominoSpeculator"}
    for theirs, ours in classes.items():
        assert type(theirs.__new__(theirs, config, torch.device("cpu"))).__name__ == ours
        assert type(theirs.__new__(theirs, plain_config, torch.device("cpu"))) is theirs


@pytest.mark.parametrize("shift_label", [True, False])
def test_the_second_runners_draft_gives_the_rollouts_tokens(monkeypatch, shift_label):
    """vLLM's own ``_generate_draft`` on rows that are given; its model needs a GPU's runner."""
    from vllm.v1.worker.gpu.spec_decode.dflash.speculator import DFlashSpeculator

    from knockon.integrations.vllm.speculator import DominoSpeculator

    size, hidden, block, requests, most = 91, 16, 6, 3, 5
    rng = torch.Generator().manual_seed(2)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=rng)

    weights = (random(24, hidden), random(24, 8), random(8, 24), random(size, 8))
    head = DominoHead(*weights, prefix_len=1, shift_label=shift_label)
    shard = VocabShard(0, 1, size, 0, size, size)
    lm_head = random(size, hidden)
    rollout = DominoRollout(head, random(size, hidden), lm_head, shard, SingleRank(), pool_size=20)
    rows = random(most * block, hidden)  # two blocks of padding, as in a graph
    bonus = torch.tensor([4, 90, 17])
    ids = torch.ones(64, dtype=torch.int32)
    ids[: requests * block : block] = bonus.int()
    steps = block - 1
    masks = torch.arange(most * block).view(most, block)[:, 1:].reshape(-1)

    speculator = object.__new__(DominoSpeculator)
    speculator._for_a_graph = False
    speculator._block_rows = None
    speculator.rollout = rollout
    speculator.num_speculative_steps = steps
    speculator.input_buffers = SimpleNamespace(input_ids=ids)
    speculator.sample_indices = masks
    speculator.sample_pos = torch.zeros(most * steps, dtype=torch.int64)
    speculator.sample_idx_mapping = speculator.sample_col = speculator.sample_pos
    speculator.temperature = speculator.seeds = torch.zeros(most)
    speculator.draft_logits = None
    speculator.draft_tokens = torch.full((most, steps), -1)
    monkeypatch.setattr(DFlashSpeculator, "_run_model", lambda self, *a, **k: rows)
    speculator._generate_draft(requests, len(rows), None, None, None)

    wanted = rollout(rows[: requests * block].view(requests, block, hidden), bonus, steps)
    assert speculator.draft_tokens[:requests].tolist() == wanted.tolist()
    assert (speculator.draft_tokens[requests:] == -1).all()
