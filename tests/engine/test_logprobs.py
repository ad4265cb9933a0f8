"""Log-probabilities come from the row the token was drawn from, and from the raw logits."""

from __future__ import annotations

import torch

from knockon.engine.logprobs import logprobs


def test_each_row_reports_its_own_token() -> None:
    logits = torch.randn(2, 3, 11, generator=torch.Generator().manual_seed(0)).bfloat16()
    tokens = torch.tensor([[1, 2, 3], [10, 0, 5]])
    result = logprobs(logits, tokens, 4)
    for b in range(2):
        for i in range(3):
            row = logits[b, i].float()
            expected = row - row.logsumexp(0)
            order = sorted(range(11), key=lambda v: (-row[v].item(), v))
            torch.testing.assert_close(result.chosen[b, i], expected[tokens[b, i]])
            assert result.rank[b, i] == 1 + (row > row[tokens[b, i]]).sum()
            assert result.top_ids[b, i].tolist() == order[:4]
            torch.testing.assert_close(result.top_values[b, i], expected[order[:4]])
    assert len(result.chosen.unique()) == 6


def test_ties_go_to_the_lower_id_and_nan_comes_last() -> None:
    logits = torch.tensor([[[0.0, 5.0, -0.0, 5.0, -torch.inf, torch.nan]]])
    result = logprobs(logits, torch.tensor([[3]]), 9)
    assert result.top_ids.tolist() == [[[1, 3, 0, 2, 4, 5]]]
    assert result.rank.item() == 1 and result.chosen.isfinite().all()


def test_none_of_the_top_is_asked_for() -> None:
    result = logprobs(torch.zeros(1, 1, 4), torch.tensor([[2]]), 0)
    assert result.top_ids.shape == (1, 1, 0)
    torch.testing.assert_close(result.chosen, torch.tensor([[0.25]]).log())
