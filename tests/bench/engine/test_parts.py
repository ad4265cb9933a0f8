"""Kernels go to the part of a step that they do the work of."""

from __future__ import annotations

import pytest

from knockon.bench.engine import parts
from knockon.bench.engine.parts import own_kernels, part_of
from knockon.bench.engine.trace import _idle


@pytest.mark.parametrize(
    ("name", "part"),
    (
        ("chain_tiled", parts.ROLLOUT),
        ("scan_rows", parts.ROLLOUT),
        ("nvjet_tst_128x64_64x5_1x2_h_bz_coopA_TNN", parts.MATMUL),
        ("void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm>", parts.MATMUL),
        ("void cublasLt::splitKreduce_kernel<32, 16>", parts.MATMUL),
        ("void gemv2T_kernel_val<int, int, __nv_bfloat16>", parts.MATMUL),
        ("aten::mm", parts.MATMUL),
        ("mkldnn::_linear_pointwise", parts.MATMUL),
        ("fmha_cutlassF_bf16_aligned_64x128_rf_sm80", parts.ATTENTION),
        ("void pytorch_flash::flash_fwd_splitkv_kernel<>", parts.ATTENTION),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", parts.ATTENTION),
        ("void at::native::vectorized_layer_norm_kernel<c10::BFloat16>", parts.NORM),
        ("void at::native::vectorized_elementwise_kernel<silu_kernel>", parts.NORM),
        ("void at::native::reduce_kernel<512, 1, ArgMaxOps<float>>", parts.SAMPLING),
        ("Memcpy DtoH (Device -> Pinned)", parts.COPIES),
        ("void at::native::CatArrayBatchedCopy<>", parts.COPIES),
        ("void at::native::vectorized_elementwise_kernel<CUDAFunctor_add>", parts.OTHER),
    ),
)
def test_a_name_tells_the_part(name, part):
    assert part_of(name) == part


def test_the_projects_kernels_are_found_in_their_files():
    found = own_kernels()
    assert {"chain_resident", "choose_best", "list_groups"} <= set(found)
    assert set(found.values()) <= set(parts.PARTS)


def test_idle_time_is_what_no_kernel_covers():
    assert _idle([]) is None
    assert _idle([(0, 10)]) == 0
    assert _idle([(0, 4), (2, 5), (6, 10)]) == pytest.approx(0.1)
    assert _idle([(6, 10), (0, 5), (1, 2)]) == pytest.approx(0.1)
