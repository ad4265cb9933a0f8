"""What decode steps read and write of every request, by slot, on the device.

A request keeps its slot from admission to its end, so requests that join and leave change only the
list of slots in a step, never the place of another's state.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from knockon.engine.request import Request
from knockon.engine.sampling import DrawKind, SamplingBatch, sampling_row
from knockon.layers.attention import NULL_PAGE


def upload(values: Sequence[object], dtype: torch.dtype, device: torch.device) -> Tensor:
    """``values`` as a tensor on the device, without making the host wait for its stream."""
    pinned = device.type == "cuda"
    return torch.tensor(values, dtype=dtype, pin_memory=pinned).to(device, non_blocking=True)


class DeviceState:
    """The state of ``S`` slots, and of one more that stands for nothing.

    A batch is filled up with the idle slot: it is of length 0, its pages are the null page, and
    what a step does to it is undone or overwritten by the next.

    Args:
        slots: ``S``, requests computed at once.
        pages: ``P``, pages that a request can hold.
        vocab_size: of the target.
        device: where the state lives.

    Attributes:
        page_table: int32 ``[S + 1, P]``.
        lengths: int64 ``[S + 1]``, verified tokens whose KV is written.
        bonus: int64 ``[S + 1]``, the token after them, chosen but not yet run.
    """

    def __init__(self, slots: int, pages: int, vocab_size: int, device: torch.device) -> None:
        self.idle = slots
        self.device = device
        self._vocab_size = vocab_size
        self.page_table = torch.full(
            (slots + 1, pages), NULL_PAGE, dtype=torch.int32, device=device
        )
        self.lengths = torch.zeros(slots + 1, dtype=torch.int64, device=device)
        self.bonus = torch.zeros(slots + 1, dtype=torch.int64, device=device)
        self._integers = torch.zeros((slots + 1, 2), dtype=torch.int64, device=device)
        self._floats = torch.zeros((slots + 1, 3), dtype=torch.float32, device=device)
        self._speculates = torch.ones(slots + 1, dtype=torch.bool, device=device)
        self._stays = [0] * slots  # of the requests in the slots, by what they name it
        self._pages = [0] * slots

    def admit(self, requests: Sequence[Request]) -> None:
        """Take over new holders of slots, and every page given to a request since the last call."""
        stays, pages = self._stays, self._pages
        changed = [r for r in requests if stays[r.slot] != r.stay or pages[r.slot] != len(r.pages)]
        if not changed:
            return
        arrived = [r for r in changed if stays[r.slot] != r.stay]
        if arrived:
            rows = [sampling_row(r.params, self._vocab_size) for r in arrived]
            slots = upload([r.slot for r in arrived], torch.int64, self.device)
            integers = [(r.seed, row.top_k) for r, row in zip(arrived, rows, strict=True)]
            floats = [(row.temperature, row.top_p, row.log_min_p) for row in rows]
            self._integers.index_copy_(0, slots, upload(integers, torch.int64, self.device))
            self._floats.index_copy_(0, slots, upload(floats, torch.float32, self.device))
            speculates = upload([r.params.speculation for r in arrived], torch.bool, self.device)
            self._speculates.index_copy_(0, slots, speculates)
            for request in arrived:
                self._stays[request.slot] = request.stay
        self._copy_pages(changed, {r.slot for r in arrived})

    def _copy_pages(self, requests: Sequence[Request], arrived: set[int]) -> None:
        at: list[int] = []
        pages: list[int] = []
        width = self.page_table.shape[1]
        for request in requests:
            slot, have = request.slot, len(request.pages)
            known = self._pages[slot]
            if slot in arrived:
                new = request.pages + [NULL_PAGE] * (known - have)
                known = 0
            elif known < have:
                new = request.pages[known:]
            else:
                continue
            at += range(slot * width + known, slot * width + known + len(new))
            pages += new
            self._pages[slot] = have
        if at:
            places = upload(at, torch.int64, self.device)
            self.page_table.view(-1).index_copy_(0, places, upload(pages, torch.int32, self.device))

    def place(self, slots: Tensor, lengths: Tensor, bonus: Tensor) -> None:
        """Set where the requests in ``slots [n]`` stand."""
        self.lengths.index_copy_(0, slots, lengths)
        self.bonus.index_copy_(0, slots, bonus)

    def advance(self, slots: Tensor, gained: Tensor, bonus: Tensor) -> None:
        """After a step: longer by ``gained [n]``; the idle slot stays where it is."""
        self.lengths.index_add_(0, slots, gained * (slots != self.idle))
        self.bonus.index_copy_(0, slots, bonus)

    def sampling(self, slots: Tensor, kind: DrawKind) -> SamplingBatch:
        """What the requests in ``slots`` asked for; without penalties and bad words."""
        integers, floats = self._integers[slots], self._floats[slots]
        return SamplingBatch(
            seed=integers[:, 0],
            temperature=floats[:, 0],
            top_k=integers[:, 1],
            top_p=floats[:, 1],
            log_min_p=floats[:, 2],
            speculates=self._speculates[slots],
            penalties=None,
            bad_words=None,
            **kind._asdict(),
        )
