"""A graph that cannot be recorded leaves the device as it was."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from knockon.engine import graph_capture
from knockon.engine.graph_capture import CaptureFailed, record


class FakeCuda:
    """Stands for a device, with the traits of ``torch.cuda.graph`` that matter: it stays on its own
    stream, and the allocator in its pool, where ending a capture raises."""

    def __init__(self, breaks: bool) -> None:
        self.breaks = breaks
        self.stream = SimpleNamespace(device_index=0)
        self.current: object = self.stream
        self.capturing = self.recording = False
        self.ended: list[object] = []
        self.generators: list[object] = []

    def graph(self, graph: object, **how: Any) -> FakeCuda:
        return self

    def __enter__(self) -> None:
        self.current, self.capturing = "its own", True

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if self.breaks and error is not None:
            raise RuntimeError("CUDA error: operation failed due to a previous error")
        self.current, self.capturing = self.stream, False

    def set_stream(self, stream: object) -> None:
        self.current = stream

    def end(self, index: int, pool: object) -> None:
        if not self.capturing:
            raise RuntimeError("not currently recording")
        self.capturing = False

    def release(self, index: int, pool: object) -> None:
        self.ended.append(pool)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> FakeCuda:
    found = FakeCuda(request.param)
    cuda = SimpleNamespace(
        graph=found.graph,
        CUDAGraph=object,
        current_stream=lambda device: found.stream,
        set_stream=found.set_stream,
        synchronize=lambda device: None,
        default_generators=[
            SimpleNamespace(clone_state=lambda: "new", graphsafe_set_state=found.generators.append)
        ],
    )
    private = SimpleNamespace(_cuda_endAllocateToPool=found.end, _cuda_releasePool=found.release)
    monkeypatch.setattr(graph_capture, "torch", SimpleNamespace(cuda=cuda, _C=private))
    return found


@pytest.mark.parametrize("fake", [False, True], indirect=True)
def test_a_failure_is_named_by_what_came_first_and_leaves_stream_and_allocator(
    fake: FakeCuda,
) -> None:
    def run() -> None:
        raise RuntimeError("a library refuses\nand says more")

    with pytest.raises(CaptureFailed, match=r"^RuntimeError: a library refuses$") as found:
        record(run, "pool", torch.device("cuda", 0))
    assert fake.current is fake.stream and not fake.capturing
    assert fake.ended == (["pool"] if fake.breaks else [])
    assert fake.generators == ["new"]
    # Frames of what failed hold tensors.
    assert found.value.__context__ is None and found.value.__cause__ is None


@pytest.mark.parametrize("fake", [False], indirect=True)
def test_an_interrupt_is_no_failure(fake: FakeCuda) -> None:
    def run() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        record(run, "pool", torch.device("cuda", 0))


@pytest.mark.parametrize("fake", [False], indirect=True)
def test_what_is_recorded_comes_with_its_result(fake: FakeCuda) -> None:
    graph, result = record(lambda: 7, "pool", torch.device("cuda", 0))
    assert result == 7 and graph is not None and fake.current is fake.stream


@pytest.mark.gpu
@pytest.mark.parametrize("first", [True, False])
def test_a_gpu_goes_on_after_a_failure(first: bool) -> None:
    """Streams, memory, generator and graphs; with another graph in the pool, and without."""
    device = torch.device("cuda", torch.cuda.current_device())
    x = torch.ones(1 << 20, device=device)
    pool = torch.cuda.graph_pool_handle()
    if not first:
        kept, kept_result = record(lambda: x + 1, pool, device)
    stream = torch.cuda.current_stream(device)

    def run() -> torch.Tensor:
        made = torch.rand(1 << 24, device=device) + x[0]
        made.sum().item()  # waits, which no capture allows
        return made

    run()
    gc.collect()
    before = torch.cuda.memory_allocated(device)
    with pytest.raises(CaptureFailed):
        record(run, pool, device)
    assert torch.cuda.current_stream(device) == stream
    assert not torch.cuda.is_current_stream_capturing()
    gc.collect()
    assert torch.cuda.memory_allocated(device) <= before
    torch.cuda.empty_cache()
    assert torch.rand(9, device=device).max() < 1
    # Memory that two streams used comes back: nothing waits for a capture to end.
    side = torch.cuda.Stream(device)
    for _ in range(2):
        block = torch.ones(1 << 26, device=device)
        block.record_stream(side)
        del block
        torch.cuda.synchronize(device)
    torch.ones(1, device=device)
    assert torch.cuda.memory_stats(device)["active_bytes.all.current"] < before + (1 << 27)
    again, result = record(lambda: x * 3, torch.cuda.graph_pool_handle(), device)
    again.replay()
    assert (result == 3).all()
    if not first:
        kept.replay()
        assert (kept_result == 2).all()
