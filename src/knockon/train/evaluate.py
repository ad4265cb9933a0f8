"""Accept lengths of a drafter on held-out prompts, by replaying the target's own greedy answers.

The chain of proposals is the one of inference: greedy, from the drafter's own tokens, over the
whole vocabulary. Because the target's answers are greedy too, what verification would accept can be
read off the answer itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from knockon.errors import Refused
from knockon.train.bulk_generate import BulkGenerator, Finished, Job
from knockon.train.chat_format import ChatFormat, read_prompts
from knockon.train.drafter_module import DraftModule
from knockon.train.frozen_target import FrozenTarget
from knockon.train.mtp_module import MTPModule
from knockon.train.objective import Anchors


@dataclass(frozen=True)
class HeldOut:
    """The target's greedy answers to one workload's prompts: ``(prompt, answer)`` token ids."""

    name: str
    answers: list[tuple[list[int], list[int]]]


def answer_workloads(
    target: FrozenTarget,
    chat: ChatFormat,
    paths: Sequence[Path],
    limit: int,
    max_new: int = 128,
    max_prompt: int = 512,
    slots: int = 768,
) -> list[HeldOut]:
    """First turns of each workload file (``{"id", "turns"}`` a line), answered greedily.

    Prompts longer than `max_prompt` are left out; a workload of which nothing is left is refused.
    """
    jobs: list[Job] = []
    for path in paths:
        turns = read_prompts(path)[:limit]
        prompts = [ids for ids in chat.encode(turns) if len(ids) <= max_prompt]
        if not prompts:
            raise Refused(str(path), len(turns), f"prompts of at most {max_prompt} tokens")
        jobs += [Job(ids, max_new, 0.0, path.stem) for ids in prompts]
    found: dict[str, list[tuple[list[int], list[int]]]] = {path.stem: [] for path in paths}

    def keep(done: list[Finished]) -> None:
        for item in done:
            found[item.job.kind].append((item.job.prompt, item.tokens))

    queue = list(jobs)

    def take(count: int) -> list[Job]:
        taken, queue[:] = queue[:count], queue[count:]
        return taken

    generator = BulkGenerator(target, min(slots, len(jobs)), max_prompt, max_new, chat.stop_ids)
    generator.run(take, keep)
    return [HeldOut(name, answers) for name, answers in found.items()]


@torch.no_grad()
def propose_everywhere(
    module: DraftModule | MTPModule,
    target: FrozenTarget,
    tokens: Tensor,
    anchors: Anchors,
    feature_layers: tuple[int, ...],
) -> Tensor:
    """The drafter's free-running proposals from every anchor: ``[b, N, L - 1]`` int64."""
    hidden, features = target.forward(tokens, feature_layers)
    steps = module.block_size - 1
    if isinstance(module, MTPModule):
        z = module.unroll(target, tokens, hidden, anchors, lambda j, z: _base(z, target).argmax(-1))
        return _base(z, target).argmax(-1)
    z = module.proposals(module.block_hidden(target, tokens, features, anchors))[
        :, :, :steps
    ].flatten(0, 1)
    bonus = tokens.gather(1, anchors.position).flatten()
    domino = module.config.domino
    chosen: list[Tensor] = []
    if domino is None:
        chosen = [_base(z[:, j], target).argmax(-1) for j in range(steps)]
    else:
        gru_in = cast(Tensor, module.prefix_gru.weight_ih_l0).float()
        gru_state = cast(Tensor, module.prefix_gru.weight_hh_l0).float()
        state = z.new_zeros(z.shape[0], domino.gru_size, dtype=torch.float32)
        token = bonus
        for j in range(steps):
            entered = F.embedding(token, target.embedding).float()
            state = torch.gru_cell(entered, state, gru_in, gru_state)
            logits = _base(z[:, j], target)
            if j >= domino.prefix_len:
                inner = F.silu(
                    F.linear(torch.cat((z[:, j].float(), state), -1), module.correction_in.float())
                )
                logits = (
                    logits.float()
                    + F.linear(
                        inner.to(target.dtype), module.correction_out.to(target.dtype)
                    ).float()
                )
            token = logits.argmax(-1)
            chosen.append(token)
    return torch.stack(chosen, 1).view(*anchors.position.shape, steps)


def _base(z: Tensor, target: FrozenTarget) -> Tensor:
    return F.linear(z.to(target.dtype), target.lm_head)


def replay(matches: list[int], width: int) -> tuple[int, int]:
    """Walks an answer as speculative decoding would.

    Args:
        matches: for each position but the last, how many proposals from there agree with the
            answer. The first position is the first answer token, which prefill gives.
        width: verify width.

    Returns:
        Tokens kept and verification steps taken.
    """
    at, steps = 0, 0
    while at < len(matches):
        at += min(min(matches[at], width - 1) + 1, len(matches) - at)
        steps += 1
    return len(matches), steps


def accept_lengths(
    module: DraftModule | MTPModule,
    target: FrozenTarget,
    workloads: Sequence[HeldOut],
    widths: Sequence[int] = (16, 8, 4),
    batch_size: int = 16,
) -> dict[str, dict[str, float]]:
    """Mean accept length of each workload at each verify width.

    ``first`` is the share of right first proposals.

    Returns:
        ``{workload: {"16": ..., "8": ..., "first": ...}}`` with a row ``mean`` over workloads.
    """
    table: dict[str, dict[str, float]] = {}
    for workload in workloads:
        kept = dict.fromkeys(widths, 0)
        steps = dict.fromkeys(widths, 0)
        right = total = 0
        answers = sorted(
            (pair for pair in workload.answers if len(pair[1]) > 1),
            key=lambda pair: len(pair[0]) + len(pair[1]),
        )
        for start in range(0, len(answers), batch_size):
            for matches in _matches(module, target, answers[start : start + batch_size]):
                right += sum(m > 0 for m in matches)
                total += len(matches)
                for width in widths:
                    gained, taken = replay(matches, width)
                    kept[width] += gained
                    steps[width] += taken
        table[workload.name] = {str(w): kept[w] / max(1, steps[w]) for w in widths} | {
            "first": right / max(1, total)
        }
    columns = [*map(str, widths), "first"]
    table["mean"] = {
        c: sum(row[c] for row in table.values()) / max(1, len(workloads)) for c in columns
    }
    return table


def _matches(
    module: DraftModule | MTPModule,
    target: FrozenTarget,
    answers: list[tuple[list[int], list[int]]],
) -> list[list[int]]:
    """How many proposals agree, for every position of every answer but its last."""
    device = target.device
    width = max(len(prompt) + len(answer) for prompt, answer in answers)
    steps = module.block_size - 1
    padded = -(-width // 64) * 64
    blocks = max(len(answer) for _, answer in answers) - 1
    tokens = torch.zeros(len(answers), padded, dtype=torch.int64)
    truth = torch.full((len(answers), padded + steps + 1), -1, dtype=torch.int64)
    position = torch.zeros(len(answers), blocks, dtype=torch.int64)
    for row, (prompt, answer) in enumerate(answers):
        ids = torch.tensor(prompt + answer)
        tokens[row, : len(ids)] = ids
        truth[row, : len(ids)] = ids
        position[row] = (len(prompt) + torch.arange(blocks)).clamp(max=len(ids) - 1)
    anchors = Anchors(position.to(device), torch.ones_like(position, dtype=torch.bool).to(device))
    layers = module.feature_layers
    proposed = propose_everywhere(module, target, tokens.to(device), anchors, layers).cpu()
    wanted = truth.gather(1, (position[..., None] + 1 + torch.arange(steps)).flatten(1)).view(
        proposed.shape
    )
    counts = (proposed == wanted).cumprod(-1).sum(-1)
    return [counts[row, : len(answer) - 1].tolist() for row, (_, answer) in enumerate(answers)]


def format_table(table: dict[str, dict[str, float]]) -> str:
    """Plain text, one workload a line."""
    columns = list(next(iter(table.values())))
    lines = ["".join([f"{'workload':<12}", *(f"{c:>8}" for c in columns)])]
    lines += [
        "".join([f"{name:<12}", *(f"{row[c]:8.3f}" for c in columns)])
        for name, row in table.items()
    ]
    return "\n".join(lines)
