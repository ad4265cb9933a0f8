"""An MTP head in the engine: where it comes from, how far it is unrolled, what it keeps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from knockon.drafters.load import load_drafter
from knockon.drafters.mtp import MTPDrafter
from knockon.errors import Refused
from knockon.layers.attention import PagedKV, SdpaBackend, plan_block
from knockon.models.target import load_target
from knockon.parallel import SingleRank
from tests.engine.generation import (
    GREEDY,
    TinyShelf,
    accept_lengths,
    check_against_reference,
    check_same,
    generate,
    load,
    random_prompts,
    target_only,
    tokens,
)
from tests.reference_mtp import ReferenceMTP
from tests.tiny_models import HIDDEN, TinyMTP, TinyTarget

PROMPTS = random_prompts(4, seed=8, low=20, high=50)
PAGE = 4


@pytest.mark.parametrize("steps", [1, 3, 7, 15])
def test_steps_proposals_verify_one_position_more(tiny: TinyShelf, steps: int) -> None:
    model, draft = tiny.target(), tiny.drafter("mtp")
    with load(model, draft, speculative_num_steps=steps) as llm:
        assert llm.metrics().verify_width == steps + 1
        assert llm.metrics().draft == "mtp"
        outputs = llm.generate(PROMPTS, GREEDY)
    assert tokens(outputs) == tokens(target_only(model, PROMPTS))
    check_against_reference(outputs, model, draft, steps + 1)


def test_three_proposals_where_nobody_says_how_many(tiny: TinyShelf) -> None:
    with load(tiny.target(), tiny.drafter("mtp")) as llm:
        assert llm.metrics().verify_width == 4


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_targets_own_head_is_found_among_its_weights(
    tiny: TinyShelf, tmp_path: Path, family: str
) -> None:
    target = TinyTarget(family)
    model, apart = tiny.target(target), tiny.drafter("mtp", target)
    both = TinyMTP(own=True).save(tmp_path / "both", model)
    expected = generate(model, apart, PROMPTS, verify_width=6)
    own = generate(both, None, PROMPTS, verify_width=6, speculative_algorithm="MTP")
    check_same(own, expected)
    check_same(generate(both, both, PROMPTS, verify_width=6), expected)
    # Without being asked for, it is left where it lies.
    assert tokens(generate(both, None, PROMPTS)) == tokens(expected)


def test_heads_on_one_page_keep_to_their_own_next_tokens(tiny: TinyShelf) -> None:
    """Prompts that part right behind a cached page: what is shared hangs on no token past it."""
    model, draft = tiny.target(), tiny.drafter("mtp")
    shared = random_prompts(1, low=40, high=41)[0]
    prompts = [[*shared, first, *PROMPTS[0][:9]] for first in (5, 6, 7)]
    cold = generate(model, draft, prompts, verify_width=8, prefix_cache=False)
    with load(model, draft, verify_width=8, page_size=PAGE) as llm:
        warm = [llm.generate(prompt, GREEDY)[0] for prompt in (*prompts, *prompts)]
    assert [output.metrics.cached_tokens for output in warm[1:3]] == [40, 40]
    check_same(warm, [*cold, *cold])
    check_against_reference(warm[:3], model, draft, 8)


def test_a_prompt_of_one_token(tiny: TinyShelf) -> None:
    """No row stands in the first place; what is kept there is seen by nobody."""
    model, draft = tiny.target(), tiny.drafter("mtp")
    outputs = generate(model, draft, [[7], [9], [250]], verify_width=8)
    check_against_reference(outputs, model, draft, 8)


@pytest.mark.parametrize("algorithm", ["NONE", "MTP", None])
def test_the_algorithm_is_held_to_what_the_draft_is(tiny: TinyShelf, algorithm: str | None) -> None:
    with load(tiny.target(), tiny.drafter("mtp"), speculative_algorithm=algorithm) as llm:
        assert llm.metrics().draft == (None if algorithm == "NONE" else "mtp")


@pytest.mark.parametrize(
    ("drafter", "settings", "message"),
    [
        ("mtp", {"speculative_algorithm": "DFLASH"}, "algorithm: found 'DFLASH', wanted MTP"),
        ("domino", {"speculative_algorithm": "MTP"}, "algorithm: found 'MTP', wanted DFLASH"),
        ("domino", {"speculative_algorithm": "EAGLE"}, "'EAGLE', wanted one of DFLASH, MTP, NONE"),
        ("domino", {"speculative_num_steps": 3}, "num_steps: found 3, wanted none"),
        ("mtp", {"speculative_num_steps": 0}, "num_steps: found 0"),
        ("mtp", {"speculative_num_steps": 3, "verify_width": 5}, "width: found 5, wanted 1 to .*4"),
        ("mtp", {"speculative_algorithm": "NONE", "verify_width": 4}, "verify_width: found 4"),
    ],
)
def test_settings_that_do_not_fit_are_refused(
    tiny: TinyShelf, drafter: str, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(Refused, match=message):
        load(tiny.target(), tiny.drafter(drafter), **settings)


def test_a_target_without_a_head_is_refused(tiny: TinyShelf, tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"found 'MTP', wanted a draft beside it.* has none"):
        load(tiny.target(), speculative_algorithm="MTP")
    both = TinyMTP(own=True).save(tmp_path / "both", tiny.target())
    save_file(load_file(tiny.target() / "model.safetensors"), both / "model.safetensors")
    with pytest.raises(Refused, match=r"none of mtp\.\*"):
        load(both, speculative_algorithm="MTP")


BAD_FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"mtp_num_hidden_layers": 2}, "mtp_num_hidden_layers: found 2, wanted 1"),
    ({"mtp_num_hidden_layers": True}, "mtp_num_hidden_layers: found True"),
    ({"num_target_layers": 9}, "num_target_layers: found 9"),
    ({"num_target_layers": None}, "num_target_layers: found None"),
    ({"model_type": "qwen3"}, "model_type: found 'qwen3', wanted the target's llama"),
    ({"model_type": "other"}, "model_type: found 'other'"),
    ({"hidden_size": HIDDEN * 2}, f"hidden_size: found {HIDDEN * 2}"),
    ({"num_hidden_layers": 3}, "num_hidden_layers: found 3"),
    ({"max_position_embeddings": 100}, "max_position_embeddings: found 100"),
]


@pytest.mark.parametrize(("fields", "message"), BAD_FIELDS)
def test_a_head_that_does_not_fit_is_refused(
    tiny: TinyShelf, tmp_path: Path, fields: dict[str, Any], message: str
) -> None:
    draft = TinyMTP().save(tmp_path / "draft", tiny.target())
    config = json.loads((draft / "config.json").read_text()) | fields
    (draft / "config.json").write_text(json.dumps(config))
    with pytest.raises(Refused, match=message):
        load(tiny.target(), draft, max_model_len=200)


@pytest.mark.parametrize("change", ["missing", "unused", "other shape"])
def test_weights_that_do_not_fit_are_refused(tiny: TinyShelf, tmp_path: Path, change: str) -> None:
    draft = TinyMTP().save(tmp_path / "draft", tiny.target())
    weights = load_file(draft / "model.safetensors")
    if change == "missing":
        del weights["mtp.fc.weight"]
    elif change == "unused":
        weights["mtp.layers.1.mlp.up_proj.weight"] = torch.zeros(3)
    else:
        weights["mtp.fc.weight"] = weights["mtp.fc.weight"][:, :-1].contiguous()
    save_file(weights, draft / "model.safetensors")
    with pytest.raises(Refused, match=r"mtp\.(fc|layers\.1)"):
        load(tiny.target(), draft)


def test_a_head_is_no_target(tiny: TinyShelf) -> None:
    with pytest.raises(Refused, match=r"MTPDraftModel.*give it as the draft"):
        load(tiny.drafter("mtp"))


def test_outputs_are_those_of_the_specification_for_requests_of_many_lengths(
    tiny: TinyShelf,
) -> None:
    """FP64, pages dealt at random, several chunks: every proposal, not only those accepted."""
    model, draft = tiny.target(), tiny.drafter("mtp")
    target = load_target(model, torch.float64, SingleRank())
    drafter = load_drafter(draft, target, SdpaBackend(), 200, mtp_steps=7)
    assert isinstance(drafter, MTPDrafter)
    reference = ReferenceMTP(draft, model)
    lengths = (1, 6, 23, 40)
    generator = torch.Generator().manual_seed(3)
    pages = (torch.randperm(len(lengths) * 12, generator=generator) + 1).view(len(lengths), 12)
    drafter.bind_kv(49 * PAGE)
    kv = [PagedKV.allocate(49 * PAGE, *target.kv_shape[1:], torch.float64) for _ in range(4)]
    texts = [torch.randint(0, 300, (n,), generator=generator).tolist() for n in lengths]
    for row, text in enumerate(texts):
        for start in range(0, len(text), 9):
            part = torch.tensor([text[start : start + 9]])
            end = start + part.shape[1]
            plan = plan_block(pages[[row]], PAGE, torch.tensor([start]), part.shape[1], end)
            features = target(part, plan, kv, drafter.feature_layers).features
            assert features is not None
            drafter.observe(features, part, plan)
    bonus = torch.tensor([3, 250, 17, 99])
    plan = plan_block(pages, PAGE, torch.tensor(lengths), 8, max(lengths) + 8)
    proposals = drafter.propose(bonus, plan, 7)
    for row, text in enumerate(texts):
        expected = reference.propose(reference.features(text), int(bonus[row]), 7)
        assert proposals[row].tolist() == expected.tokens
    assert drafter.propose(bonus, plan, 0).shape == (4, 0)
    assert torch.equal(drafter.propose(bonus, plan, 4), proposals[:, :4])


def test_accept_lengths_hang_on_the_states_it_keeps(
    tiny: TinyShelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The comparisons with the reference have teeth: other states, other accept lengths."""
    model, draft = tiny.target(), tiny.drafter("mtp")
    right = generate(model, draft, PROMPTS, verify_width=8)
    monkeypatch.setattr("knockon.drafters.mtp.MTPHead.write_kv", lambda *_: None)
    assert accept_lengths(generate(model, draft, PROMPTS, verify_width=8)) != accept_lengths(right)
