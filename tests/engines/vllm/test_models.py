"""Which models the plugin serves, and the reasons for which it refuses others."""

from types import SimpleNamespace

import pytest
import torch

from dsa.runtime import backends
from dsa_engines.decoding_batches import decoding_batches
from dsa_engines.vllm import models, warm_up
from tests.engines.vllm.configurations import GLM, V4, V32, config


def of_kind(given, backend):
    given.attention_config.backend_per_kind["mla_attention"] = SimpleNamespace(name=backend)
    return given


@pytest.fixture(autouse=True)
def hopper(monkeypatch):
    monkeypatch.setattr(backends, "why_no_kernels", lambda: None)


@pytest.mark.parametrize("hf", [V32, GLM, V4], ids=lambda hf: hf["model_type"])
@pytest.mark.parametrize("cache", ["auto", "fp8", "fp8_e4m3", "fp8_ds_mla"])
def test_served(hf, cache):
    assert models.unsupported(config(hf, cache=cache)) is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (config(V4 | {"model_type": "deepseek_v41"}), "model_type is deepseek_v41, and the plugin serves deepseek_v32"),
        (config(V32 | {"model_type": "glm5next"}), "model_type is glm5next, and the plugin serves deepseek_v32"),
        (config(V32 | {"qk_rope_head_dim": 0}), "queries of deepseek_v32 have 512 channels, and must have 576"),
        (config(V4 | {"head_dim": 256}), "queries of deepseek_v4 have 256 channels, and must have 512"),
        (config(V32, dtype=torch.float16), "the model's dtype is torch.float16, and must be torch.bfloat16"),
        (config(V32 | {"index_n_heads": 24}), "index_n_heads is 24, and must be one of 8, 16, 32, 64"),
        (config(V32 | {"index_head_dim": 96}), "index_head_dim is 96, and must be one of 32, 64, 128"),
        (config(V32 | {"index_topk": 8192}), "index_topk is 8192, and can be at most 4096"),
        (config(V32, index_cache="mxfp4"), "the cache of index keys is mxfp4, and must be fp8"),
        (
            config(V32, cache="nvfp4_ds_mla"),
            "the cache of keys is nvfp4_ds_mla, and must be one of auto, bfloat16, fp8",
        ),
        (config(V4, cache="bfloat16"), "the cache of keys is bfloat16, and must be one of auto, fp8"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_refused(given, message):
    assert models.unsupported(given).startswith(message)


def test_another_gpu_is_refused(monkeypatch):
    reason = "the GPU is sm_100, and the kernels are for sm_90 (Hopper)"
    monkeypatch.setattr(backends, "why_no_kernels", lambda: reason)
    assert models.unsupported(config(V32)) == reason


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (config(V32, cache="fp8"), None),
        (config(GLM, cache="fp8_ds_mla"), None),
        (config(V4), None),
        (config(V32, backend="FLASHMLA_SPARSE"), None),
        (config(V4, backend="FLASHMLA_SPARSE_DSV4"), None),
        (config(V32), "vLLM prefers another attention for a bf16 cache, and --attention-backend FLASHMLA_SPARSE asks"),
        (
            config(V32, cache="fp8", backend="FLASHINFER_MLA_SPARSE_SM90"),
            "attention is FLASHINFER_MLA_SPARSE_SM90, and",
        ),
        (config(V32, cache="fp8_e4m3"), "vLLM prefers another attention for a fp8_e4m3 cache, and"),
        (config(V32, cache="fp8_e4m3", backend="FLASHMLA_SPARSE"), None),
        (of_kind(config(V32, backend="FLASHMLA_SPARSE"), "FLASHINFER_MLA_SPARSE_SM90"), "attention is FLASHINFER_MLA_"),
        (of_kind(config(V32, backend="FLASHINFER_MLA_SPARSE_SM90"), "FLASHMLA_SPARSE"), None),
        (of_kind(config(V4), "FLASHINFER_MLA_SPARSE_DSV4"), None),  # V4 ignores `backend_per_kind`
        (config(V4, backend="FLASHINFER_MLA_SPARSE_DSV4"), "attention is FLASHINFER_MLA_SPARSE_DSV4, and dsa has"),
    ],
)
def test_whose_attention_is_another(given, reason):
    found = models.other_attention(given)
    assert found is None if reason is None else found.startswith(reason)


def test_calls():
    calls = models.calls_of(config(V32, heads=16, cache="fp8", speculated=2))
    assert (calls.heads, calls.next_n, calls.keys, calls.fp8_cache, calls.compressed) == (16, 3, 163840, True, 0)
    assert models.calls_of(config(V32)).fp8_cache is False
    assert models.calls_of(config(V32, heads=16, cache="fp8", sharing=4)).heads == 64
    assert models.calls_of(config(V32, speculated=4)).next_n == 1  # vLLM computes 5 queries of a sequence separately
    calls = models.calls_of(config(V4, heads=8, max_model_len=1 << 20))
    assert (calls.query_dim, calls.keys, calls.compressed, calls.window) == (512, 1 << 18, 8192, 128)
    assert calls.fp8_cache is True


SMALL = {"heads": 8, "max_model_len": 512, "tokens": 3}


@pytest.mark.parametrize(
    ("hf", "ops", "called"),
    [
        (V32, {"scores"}, {"gather_keys", "scores", "paged 1", "paged 2"}),
        (V32, {"topk"}, {"topk_prefill", "topk_decode"}),
        (V32, {"attention"}, {"fp8_attention", "bf16_attention"}),
        (V4, {"attention"}, {"v4_attention", "v4_prefill"}),
        (V32, {"select"}, {"indexer_select"}),
        (V32, {"prefill"}, {"mha_varlen_fwd all keys", "mha_varlen_fwd selected keys"}),
        (V32, {"queries"}, {"apply_rotary"}),
        (V4, {"prefill", "queries"}, set()),
    ],
)
def test_warm_up_calls_what_the_model_will(monkeypatch, hf, ops, called):
    seen = set()

    def noted(module, name, what):
        function = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args, **kwargs: (seen.add(what(args)), function(*args, **kwargs))[1])

    for name in ("gather_keys", "topk_prefill", "topk_decode", "fp8_attention", "bf16_attention", "v4_attention"):
        noted(warm_up.adapters, name, lambda args, name=name: name)
    noted(warm_up.adapters, "v4_prefill", lambda args: "v4_prefill")
    noted(warm_up.dsa, "indexer_select", lambda args: "indexer_select")
    noted(warm_up.dsa, "apply_rotary", lambda args: "apply_rotary")
    multi_head = warm_up.dsa.mha_varlen_fwd

    def noted_multi_head(*args, selected, **options):
        seen.add(f"mha_varlen_fwd {'all' if selected is None else 'selected'} keys")
        return multi_head(*args, selected=selected, **options)

    monkeypatch.setattr(warm_up.dsa, "mha_varlen_fwd", noted_multi_head)
    monkeypatch.setattr(warm_up.select, "LEAST_KEYS", SMALL["max_model_len"])
    monkeypatch.setattr(warm_up.select, "LEAST_QUERIES", 4)
    noted(warm_up.deep_gemm, "fp8_fp4_mqa_logits", lambda args: "scores")
    noted(warm_up.deep_gemm, "fp8_fp4_paged_mqa_logits", lambda args: f"paged {args[0][0].shape[1]}")
    hf = hf | {"index_topk": 64}
    calls = models.calls_of(config(hf, cache="fp8", speculated=1, **SMALL))
    warm_up.warm_up(calls, frozenset(ops), "cpu")
    assert seen == called


def test_warm_up_of_a_bf16_cache_calls_no_kernel_for_bytes(monkeypatch):
    monkeypatch.setattr(warm_up.adapters, "fp8_attention", None)
    calls = models.calls_of(config(V32 | {"index_topk": 64}, **SMALL))
    warm_up.warm_up(calls, frozenset({"attention"}), "cpu")


def test_warm_up_has_every_batch_that_has_kernels_of_its_own(monkeypatch):
    """Attention runs for the batches of `decoding_batches` that fit in a step, and once for the largest step."""
    monkeypatch.setattr(warm_up.dsa, "num_sms", lambda device: 132)
    for tokens in (8192, 100, 17):
        calls = models.calls_of(config(V32 | {"index_topk": 64}, cache="fp8", **SMALL | {"heads": 4, "tokens": tokens}))
        counts = [len(q) for q, _ in warm_up.queries(calls, 64)]
        batches = decoding_batches(132)
        assert counts == [n for n in batches if n < tokens] + [tokens] * (tokens <= batches[-1])
