"""The same on a GPU: kernels are traced there, and synthetic acceptance is captured in a graph."""

from __future__ import annotations

import pytest
import torch

from knockon.bench.engine.run import measure
from knockon.bench.engine.settings import settle
from knockon.bench.engine.synthetic import SyntheticAccept
from knockon.engine.sampling import SamplingBatch, SamplingRequest
from knockon.engine.sampling_params import SamplingParams

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def tiny_report():
    return measure(
        settle(
            model="tiny",
            device="cuda",
            concurrency=(1, 3),
            input_len=16,
            output_len=96,
            accept_lengths={"dflash": 3.0, "domino": 5.0},
            repeats=1,
            profile=True,
        )
    )


def test_kernels_are_traced_by_part(tiny_report):
    for found in tiny_report.measurements:
        profile = found.profile
        assert profile is not None and profile.kind == "CUDA kernels" and profile.steps > 0
        assert profile.parts_ms["matmul"] > 0 and profile.busy_ms <= profile.wall_ms
        assert profile.idle is not None and 0 <= profile.idle < 1
    assert tiny_report.facts["target"].memory > 0


def test_accept_lengths_come_out_as_asked(tiny_report):
    for method, mean in (("target", 1.0), ("dflash", 3.0), ("domino", 5.0)):
        for concurrency in (1, 3):
            label = method if method == "target" else f"{method} w16"
            found = tiny_report.at(label, concurrency)
            assert found.accept_length == pytest.approx(mean, rel=0.1)


def test_a_graph_accepts_what_a_cpu_does():
    accept = SyntheticAccept(6.878, 16)
    requests = [SamplingRequest(SamplingParams(temperature=0.0), seed) for seed in range(64)]
    on_cpu, on_gpu = (SamplingBatch.build(requests, 1000, device) for device in ("cpu", "cuda"))
    proposals = torch.randint(1000, (64, 15))
    drawn = torch.randint(1000, (64, 16))
    positions = torch.arange(64)[:, None] + torch.arange(16)
    static = [tensor.cuda() for tensor in (proposals, drawn, positions)]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        accept(*static, on_gpu)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = accept(*static, on_gpu)
    for shift in (0, 1000):
        static[2].copy_(positions + shift)
        graph.replay()
        wanted = accept(proposals, drawn, positions + shift, on_cpu)
        for found, expected in zip(captured, wanted, strict=True):
            assert torch.equal(found.cpu(), expected)
