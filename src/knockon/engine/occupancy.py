"""How much an engine can hold, and how much it holds now: what a server tells of it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Capacity:
    """What an engine was made to hold; the same for its whole life.

    Attributes:
        max_length: positions that a request may reach, prompt and output.
        max_batch_size: requests computed at once.
        num_pages: KV pages that requests can hold.
        page_size: positions a page.
        vocab_size: token ids that a prompt may have.
        num_checkpoints: states of recurrent layers that can be kept for later prompts.
        state_bytes: what all states of recurrent layers take on a rank.
        state_dtype: what those are kept in; empty without such layers.
    """

    max_length: int
    max_batch_size: int
    num_pages: int
    page_size: int
    vocab_size: int
    num_checkpoints: int = 0
    state_bytes: int = 0
    state_dtype: str = ""


@dataclass(frozen=True)
class Occupancy:
    """A snapshot of requests and pages.

    Attributes:
        running: requests in prefill or decode.
        waiting: requests queued for a place or for pages.
        held_pages: pages that a request holds.
        cached_pages: pages that nobody holds, kept for later prompts.
        cached_states: states of recurrent layers kept for later prompts.
    """

    running: int
    waiting: int
    held_pages: int
    cached_pages: int
    cached_states: int = 0
