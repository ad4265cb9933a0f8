"""Training sequences, packed: one flat array of tokens, and where each prompt and answer begins."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from knockon.errors import Refused


@dataclass(frozen=True)
class PackedSequences:
    """Sequences that a target wrote.

    Attributes:
        tokens: ``[sum of lengths]`` int32.
        offsets: ``[n + 1]`` int64, sequence ``i`` is ``tokens[offsets[i] : offsets[i+1]]``.
        prompt_lengths: ``[n]`` int32; the tokens after the prompt are supervised.
    """

    tokens: Tensor
    offsets: Tensor
    prompt_lengths: Tensor

    @classmethod
    def pack(cls, sequences: Sequence[tuple[Sequence[int], Sequence[int]]]) -> PackedSequences:
        """From (prompt, answer) pairs."""
        lengths = np.array(
            [len(prompt) + len(answer) for prompt, answer in sequences], dtype=np.int64
        )
        tokens = np.empty(int(lengths.sum()), dtype=np.int32)
        offsets = np.concatenate((np.zeros(1, np.int64), lengths.cumsum()))
        for start, (prompt, answer) in zip(offsets, sequences, strict=False):
            tokens[start : start + len(prompt)] = prompt
            tokens[start + len(prompt) : start + len(prompt) + len(answer)] = answer
        prompts = np.array([len(prompt) for prompt, _ in sequences], dtype=np.int32)
        return cls(torch.from_numpy(tokens), torch.from_numpy(offsets), torch.from_numpy(prompts))

    @classmethod
    def join(cls, first: PackedSequences, second: PackedSequences) -> PackedSequences:
        """Both, in that order."""
        return cls(
            torch.cat((first.tokens, second.tokens)),
            torch.cat((first.offsets, second.offsets[1:] + first.offsets[-1])),
            torch.cat((first.prompt_lengths, second.prompt_lengths)),
        )

    def prompts(self) -> set[tuple[int, ...]]:
        """The distinct prompts."""
        tokens, starts = self.tokens.tolist(), self.offsets.tolist()
        lengths = self.prompt_lengths.tolist()
        return {
            tuple(tokens[start : start + length])
            for start, length in zip(starts, lengths, strict=False)
        }

    def part(self, numbers: np.ndarray) -> PackedSequences:
        """Some of the sequences, in the order of their numbers ``[m]`` int64."""
        lengths = self.lengths.numpy()[numbers]
        starts = self.offsets.numpy()[numbers]
        offsets = np.concatenate((np.zeros(1, np.int64), lengths.cumsum()))
        at = np.repeat(starts - offsets[:-1], lengths) + np.arange(int(offsets[-1]))
        return PackedSequences(
            self.tokens[torch.from_numpy(at)],
            torch.from_numpy(offsets),
            self.prompt_lengths[torch.from_numpy(numbers)],
        )

    def pairs(self) -> list[tuple[list[int], list[int]]]:
        """``(prompt, answer)`` of each; the inverse of `pack`."""
        tokens, offsets = self.tokens.tolist(), self.offsets.tolist()
        return [
            (tokens[start : start + prompt], tokens[start + prompt : end])
            for start, end, prompt in zip(
                offsets[:-1], offsets[1:], self.prompt_lengths.tolist(), strict=True
            )
        ]

    def hold_out(self, count: int, seed: int) -> tuple[PackedSequences, PackedSequences]:
        """The rest, and `count` sequences drawn at random whose prompts are nowhere in the rest."""
        chosen = np.random.default_rng((seed, 1)).permutation(len(self))[:count]
        tokens, starts = self.tokens.numpy(), self.offsets.numpy()
        ends = starts[:-1] + self.prompt_lengths.numpy()
        prompts = [tokens[a:b].tobytes() for a, b in zip(starts, ends, strict=False)]
        held = {prompts[number] for number in chosen}
        kept = np.array([i for i, prompt in enumerate(prompts) if prompt not in held], np.int64)
        return self.part(kept), self.part(np.sort(chosen))

    def __len__(self) -> int:
        return self.prompt_lengths.shape[0]

    @property
    def lengths(self) -> Tensor:
        """``[n]`` int64."""
        return self.offsets[1:] - self.offsets[:-1]

    @property
    def answer_tokens(self) -> int:
        """Supervised tokens in all."""
        return int(self.tokens.shape[0]) - int(self.prompt_lengths.sum())

    def to(self, device: torch.device) -> PackedSequences:
        return PackedSequences(
            self.tokens.to(device), self.offsets.to(device), self.prompt_lengths.to(device)
        )

    def save(self, path: Path) -> None:
        """Writes one safetensors file, whole or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        # Vocabularies of today's small models fit 16 bits: half the disk, and half the transfers.
        narrow = len(self.tokens) == 0 or int(self.tokens.max()) <= torch.iinfo(torch.uint16).max
        save_file(
            {
                "tokens": self.tokens.to(torch.uint16) if narrow else self.tokens,
                "offsets": self.offsets,
                "prompt_lengths": self.prompt_lengths,
            },
            partial,
        )
        partial.replace(path)

    @classmethod
    def load(cls, path: Path) -> PackedSequences:
        """Raises `Refused` where the file lacks a part or the parts do not fit each other."""
        parts = load_file(path)
        missing = {"tokens", "offsets", "prompt_lengths"} - parts.keys()
        if missing:
            raise Refused(str(path), sorted(parts), "tokens, offsets and prompt_lengths")
        tokens = parts["tokens"].to(torch.int32)
        found = cls(tokens, parts["offsets"], parts["prompt_lengths"])
        if (
            int(found.offsets[-1]) != found.tokens.shape[0]
            or found.offsets.shape[0] != len(found) + 1
        ):
            raise Refused(
                str(path),
                found.tokens.shape[0],
                f"{int(found.offsets[-1])} tokens, as its offsets say",
            )
        return found

    def batch(self, index: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """Right-padded rows of some sequences, on the device where the tokens are.

        Args:
            index: ``[b]`` int64.
            width: ``T``, at least the longest of them.

        Returns:
            tokens ``[b, T]`` int64 and the mask of supervised ones, bool ``[b, T]``.
        """
        at = torch.arange(width, device=self.tokens.device)
        start = self.offsets[index][:, None]
        length = self.offsets[index + 1][:, None] - start
        inside = at < length
        tokens = self.tokens[(start + at).clamp(max=self.tokens.shape[0] - 1)].long()
        supervised = inside & (at >= self.prompt_lengths[index][:, None])
        return tokens.masked_fill(~inside, 0), supervised


class BatchOrder:
    """Which sequences make batch number ``k``: a function of seed and ``k`` alone, for resuming.

    Every epoch goes through all sequences in a new order. Batches are made of sequences of similar
    length, so that little of them is padding, and come in random order within a stretch of
    `stretch` batches.
    """

    def __init__(
        self, lengths: Tensor, batch_size: int, seed: int, stretch: int = 64, multiple: int = 32
    ) -> None:
        if len(lengths) < batch_size:
            raise Refused("sequences", len(lengths), f"at least one batch of {batch_size}")
        self.lengths = lengths.cpu().numpy()
        self.batch_size, self.seed, self.stretch, self.multiple = (
            batch_size,
            seed,
            stretch,
            multiple,
        )
        self.batches_per_epoch = len(self.lengths) // batch_size
        self._epoch = -1
        self._batches: list[np.ndarray] = []

    def tokens(self, number: int) -> int:
        """Tokens of a batch, without its padding."""
        return int(self.lengths[self.batch(number)[0]].sum())

    def batch(self, number: int) -> tuple[np.ndarray, int]:
        """Sequence numbers ``[b]`` of a batch and its width in tokens."""
        epoch, position = divmod(number, self.batches_per_epoch)
        if epoch != self._epoch:
            self._epoch, self._batches = epoch, list(self._deal(epoch))
        chosen = self._batches[position]
        longest = int(self.lengths[chosen].max())
        return chosen, -(-longest // self.multiple) * self.multiple

    def _deal(self, epoch: int) -> Iterator[np.ndarray]:
        generator = np.random.default_rng((self.seed, epoch))
        order = generator.permutation(len(self.lengths))[: self.batches_per_epoch * self.batch_size]
        for start in range(0, len(order), self.stretch * self.batch_size):
            part = order[start : start + self.stretch * self.batch_size]
            part = part[np.argsort(self.lengths[part], kind="stable")].reshape(-1, self.batch_size)
            yield from part[generator.permutation(len(part))]
