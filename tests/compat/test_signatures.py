"""The signatures of `dsa.compat` are those of DeepGEMM 2.8 and FlashMLA. An argument whose position differs between
builds of these libraries is keyword-only."""

import inspect

import pytest

from dsa.compat import deep_gemm, flash_mla

RECIPES = "recipe recipe_a recipe_b compiled_dims disable_ue8m0_cast"
RANGES = "q kv weights cu_seq_len_k_start cu_seq_len_k_end"
PAGED = "q kv_cache weights context_lens block_table schedule_meta max_context_len"
POSITIONS = {
    deep_gemm.fp8_gemm_nt: f"a b d c {RECIPES} alpha epilogue",
    deep_gemm.m_grouped_fp8_gemm_nt_contiguous: f"a b d grouped_layout {RECIPES} use_psum_layout ensure_zero_padding "
    "expected_m_for_psum_layout epilogue",
    deep_gemm.m_grouped_fp8_gemm_nt_masked: f"a b d masked_m expected_m {RECIPES} epilogue",
    deep_gemm.k_grouped_fp8_gemm_nt_contiguous: "a b d ks_cpu grouped_layout c recipe compiled_dims use_psum_layout "
    "epilogue",
    deep_gemm.transform_sf_into_required_layout: "sf mn k recipe num_groups is_sfa disable_ue8m0_cast psum_layout",
    deep_gemm.fp8_fp4_mqa_logits: f"{RANGES} max_seqlen_k schedule_meta",
    deep_gemm.fp8_mqa_logits: f"{RANGES} clean_logits max_seqlen_k",
    deep_gemm.fp8_fp4_paged_mqa_logits: f"{PAGED} indices",
    deep_gemm.fp8_paged_mqa_logits: f"{PAGED} clean_logits indices",
    deep_gemm.get_paged_mqa_logits_metadata: "context_lens block_kv num_sms indices",
    flash_mla.flash_mla_with_kvcache: "q k_cache block_table cache_seqlens head_dim_v tile_scheduler_metadata "
    "num_splits softmax_scale causal is_fp8_kvcache indices attn_sink extra_k_cache extra_indices_in_kvcache "
    "topk_length extra_topk_length",
    flash_mla.flash_mla_sparse_fwd: "q kv indices sm_scale d_v attn_sink topk_length",
    flash_mla.get_mla_decoding_metadata: "seqlens_k num_q_tokens_per_head_k h_k h_q is_fp8_kvcache topk use_legacy",
}


@pytest.mark.parametrize(("function", "names"), POSITIONS.items())
def test_a_position_has_the_same_meaning_in_all_builds(function, names):
    parameters = inspect.signature(function).parameters.values()
    assert [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD] == names.split()


@pytest.mark.parametrize("name", ["fp8_gemm_nt", "m_grouped_fp8_gemm_nt_contiguous", "m_grouped_fp8_gemm_nt_masked"])
def test_a_product_has_two_names(name):
    assert getattr(deep_gemm, name.replace("fp8_", "fp8_fp4_")) is getattr(deep_gemm, name)


@pytest.mark.parametrize(("module", "name"), [(deep_gemm, "bf16_gemm_nt"), (flash_mla, "flash_attn_varlen_func")])
def test_a_name_that_is_missing_is_answered_with_those_that_there_are(module, name):
    assert not hasattr(module, name)
    with pytest.raises(AttributeError, match=rf"has no '{name}'. It has .*{module.__all__[0]}, {module.__all__[1]}"):
        getattr(module, name)
