"""DeepGEMM's FP8 products and index scores, under its names and with its signatures.

`import dsa.compat.deep_gemm as deep_gemm` replaces `import deep_gemm` (2.8.1, or an earlier build) in code that
multiplies FP8 matrices or scores keys on Hopper. All products except `k_grouped_fp8_gemm_nt_contiguous` have two names,
as in DeepGEMM: `fp8_gemm_nt` is `fp8_fp4_gemm_nt`, and so on. With only this import changed, DeepGEMM's own
tests/test_fp8_fp4.py (2.6.1, the newest published version) runs on Hopper, if DG_USE_NVIDIA_TOOLS=1 is set. This
variable skips the timing, which would call `cublaslt_gemm_nt`; this module lacks that function.

As in DeepGEMM on Hopper,
- a and b are (e4m3 values, fp32 scales) and row-major. a has a scale per row and 128 channels; b has a scale per 128 x
  128 block. Scales may be stored row-major or column-major (`get_mn_major_tma_aligned_tensor`);
- the caller passes the result tensor d, [..., N] with any row stride, and the functions return nothing;
- nothing is copied to the host and nothing waits for the GPU, so that a CUDA graph can capture the calls;
- FP4 values, scales packed four to an int32, `alpha` and epilogues are refused.

These products run the kernels of `dsa.fp8_gemm_nt` and `dsa.grouped_fp8_gemm_nt`, and each row of d has the same bits
as with these ops. In the recipe (1, 1, 128), which is for gradients of weights, b has a scale per row, and d is
accumulated in fp32. This recipe has no kernel here: PyTorch dequantizes both operands and multiplies them in fp32
without tensor cores, many times slower than DeepGEMM (`gradients`).
Beyond DeepGEMM, d may also be fp32 or fp16, N may be any multiple of 8 and K any multiple of 16, and groups may begin
at any row. `compiled_dims`, `disable_ue8m0_cast` and `ensure_zero_padding` have no effect: no row of padding is zeroed.

Errors are those of the ops, and name the arguments as the ops do ("a[1]: ..."). They are ValueError or TypeError, and
are raised before a kernel is launched.
Sources: DeepGEMM's csrc/apis/gemm.hpp, layout.hpp and tests of FP8 products (2.6.1), and the schemas of 2.8.1.
"""

from typing import NoReturn

from dsa.compat.deep_gemm.gradients import k_grouped_fp8_gemm_nt_contiguous
from dsa.compat.deep_gemm.grouped import m_grouped_fp8_fp4_gemm_nt_contiguous, m_grouped_fp8_fp4_gemm_nt_masked
from dsa.compat.deep_gemm.layout import (
    get_mk_alignment_for_contiguous_layout,
    get_mn_major_tma_aligned_tensor,
    get_theoretical_mk_alignment_for_contiguous_layout,
    get_tma_aligned_size,
    set_mk_alignment_for_contiguous_layout,
    transform_sf_into_required_layout,
)
from dsa.compat.deep_gemm.logits import (
    fp8_fp4_mqa_logits,
    fp8_fp4_paged_mqa_logits,
    fp8_mqa_logits,
    fp8_paged_mqa_logits,
    get_num_sms,
    get_paged_mqa_logits_metadata,
)
from dsa.compat.deep_gemm.product import fp8_fp4_gemm_nt

__all__ = [
    "fp8_fp4_gemm_nt",
    "fp8_fp4_mqa_logits",
    "fp8_fp4_paged_mqa_logits",
    "fp8_gemm_nt",
    "fp8_mqa_logits",
    "fp8_paged_mqa_logits",
    "get_mk_alignment_for_contiguous_layout",
    "get_mn_major_tma_aligned_tensor",
    "get_num_sms",
    "get_paged_mqa_logits_metadata",
    "get_theoretical_mk_alignment_for_contiguous_layout",
    "get_tma_aligned_size",
    "k_grouped_fp8_gemm_nt_contiguous",
    "m_grouped_fp8_fp4_gemm_nt_contiguous",
    "m_grouped_fp8_fp4_gemm_nt_masked",
    "m_grouped_fp8_gemm_nt_contiguous",
    "m_grouped_fp8_gemm_nt_masked",
    "set_mk_alignment_for_contiguous_layout",
    "transform_sf_into_required_layout",
]

fp8_gemm_nt = fp8_fp4_gemm_nt
m_grouped_fp8_gemm_nt_contiguous = m_grouped_fp8_fp4_gemm_nt_contiguous
m_grouped_fp8_gemm_nt_masked = m_grouped_fp8_fp4_gemm_nt_masked


def __getattr__(name: str) -> NoReturn:
    raise AttributeError(f"{__name__} has no {name!r}. It has DeepGEMM's {', '.join(__all__)}")
