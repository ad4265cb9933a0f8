"""Bulk generation is greedy decoding, whatever the slots and the order of refills."""

from __future__ import annotations

import time

import pytest
import torch
from transformers import LlamaForCausalLM

from knockon.errors import Refused
from knockon.train.bulk_generate import BulkGenerator, Finished, Job
from knockon.train.frozen_target import FrozenTarget


def run(generator: BulkGenerator, jobs: list[Job], deadline: float | None = None) -> list[Finished]:
    queue, done = list(jobs), []

    def take(count: int) -> list[Job]:
        taken, queue[:] = queue[:count], queue[count:]
        return taken

    generator.run(take, done.extend, deadline)
    return done


def test_forward_matches_transformers(llama: LlamaForCausalLM, target: FrozenTarget) -> None:
    tokens = torch.randint(3, 96, (2, 17))
    hidden, features = target.forward(tokens, (0, 2))
    with torch.no_grad():
        want = llama.model(tokens, output_hidden_states=True)
    torch.testing.assert_close(hidden, want.last_hidden_state, rtol=1e-4, atol=1e-5)
    wanted = torch.cat((want.hidden_states[1], want.hidden_states[3]), -1)
    torch.testing.assert_close(features, wanted, rtol=1e-4, atol=1e-5)


def test_greedy_equals_transformers_with_refill(
    llama: LlamaForCausalLM, target: FrozenTarget
) -> None:
    torch.manual_seed(1)
    prompts = [torch.randint(3, 96, (n,)).tolist() for n in (1, 2, 5, 9, 3, 30, 7, 66, 4, 12, 1)]
    jobs = [Job(prompt, 6 + i % 3 * 7) for i, prompt in enumerate(prompts)]
    generator = BulkGenerator(target, 3, 70, 20, (2,), steps_per_look=4)
    done = {tuple(item.job.prompt): item for item in run(generator, jobs)}
    assert len(done) == len(set(map(tuple, prompts)))
    for job in jobs:
        item = done[tuple(job.prompt)]
        want = llama.generate(
            torch.tensor([job.prompt]),
            attention_mask=torch.ones(1, len(job.prompt), dtype=torch.long),
            max_new_tokens=item.job.max_new,
            do_sample=False,
        )[0, len(job.prompt) :]
        assert item.tokens == want.tolist()
        assert item.stopped == (item.tokens[-1] == 2)


def test_sampling_differs_between_slots_and_greedy_rows_stay_greedy(target: FrozenTarget) -> None:
    prompt = [5, 6, 7]
    jobs = [Job(prompt, 12, temperature) for temperature in (0.0, 2.0, 2.0, 0.0)]
    done = run(BulkGenerator(target, 4, 8, 12, (2,), min_p=0.0), jobs)
    greedy = [item.tokens for item in done if item.job.temperature == 0]
    warm = [item.tokens for item in done if item.job.temperature > 0]
    assert greedy[0] == greedy[1]
    assert warm[0] != warm[1]


def test_deadline_gives_what_there_is(target: FrozenTarget) -> None:
    jobs = [Job([5, 6], 100), Job([7], 100)]
    generator = BulkGenerator(target, 2, 8, 100, (), steps_per_look=1)
    done = run(generator, jobs, time.monotonic() + 0.05)
    assert len(done) == 2
    assert not any(item.stopped for item in done)


def test_too_long_a_prompt_is_refused(target: FrozenTarget) -> None:
    with pytest.raises(Refused, match="prompt length"):
        run(BulkGenerator(target, 1, 4, 4, (2,)), [Job([3] * 5, 2)])
