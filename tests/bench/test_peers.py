"""Every peer is called as its library demands, and its results agree with ours. The probe reports which peers fail."""

import sys
import types
from functools import partial
from pathlib import Path

import pytest
import torch

import dsa
from dsa_bench.harness import case as cases
from dsa_bench.peers import deep_gemm, probe, topk
from dsa_bench.peers.package import Library

NEW, OLD = "vllm.third_party.deep_gemm", "deep_gemm"

SHAPES = {
    "flash_mla_sparse_fwd": [(256, 576, 64, 128, 64), (256, 512, 16, 128, 64)],
    "flash_mla_with_kvcache": [(2, 128, 16, 2)],
    "flash_mla_with_kvcache_sparse": [(2, 64, 2, 64, 128), (1, 16, 1, 64, 128)],
    "fp8_gemm_nt": [(5, 192, 256, None, None), (6, 192, 256, 4, 2), (300, 192, 256, 4, 2)],
    "fp8_mqa_logits": [(16, 64, 32, 32, True), (16, 64, 64, 64, False)],
    "fp8_fp4_gemm_nt": [(6, 256, 256, 4, 2)],
    "grouped_fp8_gemm_swiglu": [(6, 128, 256, 4, 2, 1.0)],
    "hyper_connections": [(op, 70, 256) for op in ("collapse", "expand", "mix and collapse")],
    "hyper_expand_mix": [(3, 256)],
    "hyper_mix": [(70, 256)],
    "linear_layers": [(5, 192, 256), (600, 192, 256)],
    "fp8_paged_mqa_logits": [*((2, n, 100, 32) for n in (1, 2, 3, 4)), (2, 4, 100, 32, "float16"), (4, 1, 0, 32)],
    "indexer_select": [
        (40, 2500, 32, 32, 2048, "normal"),
        (16, 64, 64, 64, 8, "plateau"),
        (9, 72, 32, 32, 3, "ascending"),
    ],
    "merge_attention": [(8, 2, 2, False)],
    "paged_indexer_select": [(2, 2500, 1, 64, 2048), (70, 100, 2, 32, 30), (2, 100, 4, 64, 30)],
    "per_token_cast_to_fp8": [(8, 256, False, ue8m0) for ue8m0 in (True, False)],
    "sliding_window_attention": [("prefill", 130, 64), ("prefill, selected", 512, 64), ("decode", 2, 64)],
    "window_attention_cast": [(20, 64, 8, 0)],
    "topk_indices": [(4, 2500, "normal", 2048), (4, 2500, "indexer", 2048), (70, 200, "plateau", 16)],
}
TOPK = ("vllm prefill", "vllm decode", "vllm persistent", "vllm cooperative", "sglang", "deepselect")
EVERYONE = {
    "flash_mla_sparse_fwd": {
        *("sgl-flash-mla", "flashmla"),
        *("sgl-flash-mla, padded to 64", "flashmla, padded to 64"),
    },
    "flash_mla_with_kvcache": {"sgl-flash-mla", "flashmla"},
    "flash_mla_with_kvcache_sparse": {
        *("sgl-flash-mla", "flashmla"),
        *("sgl-flash-mla, padded to 64", "flashmla, padded to 64"),
    },
    "fp8_gemm_nt": {"deepgemm 2.8.1", "deepgemm", "deepgemm 2.8.1, masked", "cuBLASLt"},
    "fp8_fp4_gemm_nt": {"deepgemm 2.8.1, FP8", "deepgemm, FP8", "deepgemm 2.8.1, masked, FP8"},
    "grouped_fp8_gemm_swiglu": {
        *("deepgemm 2.8.1, our cast", "deepgemm, our cast"),
        "deepgemm 2.8.1, masked, our cast",
    },
    "linear_layers": {"deepgemm 2.8.1", "cuBLASLt"},
    "fp8_mqa_logits": {"deepgemm 2.8.1, not cleaned", "deepgemm 2.8.1", "deepgemm", "cuDNN-FE"},
    "fp8_paged_mqa_logits": {"deepgemm 2.8.1", "deepgemm"},
    "hyper_connections": {"tile-kernels", "deepgemm 2.8.1, tile-kernels"},
    "hyper_expand_mix": {"deepgemm 2.8.1, tile-kernels"},
    "hyper_mix": {"deepgemm 2.8.1, TF32"},
    "indexer_select": {f"deepgemm 2.8.1, {name}" for name in TOPK},
    "merge_attention": {"vllm", "sglang"},
    "paged_indexer_select": {f"deepgemm 2.8.1, {name}" for name in TOPK},
    "per_token_cast_to_fp8": {"vllm", "sglang"},
    "sliding_window_attention": {"sgl-flash-mla", "flashmla"},
    "window_attention_cast": {"sgl-flash-mla", "flashmla"},
    "topk_indices": {*TOPK, "cuDNN-FE", "cuDNN-FE deterministic"},
}


@pytest.fixture
def small(monkeypatch, on_cpu):
    probe_only(monkeypatch, SHAPES)
    monkeypatch.setattr(cases.load("sliding_window_attention"), "SELECTED", 128)
    monkeypatch.setattr(cases.load("flash_mla_with_kvcache_sparse"), "_cache", a_small_cache)
    # On a CPU torch has no block-scaled product.
    product = types.SimpleNamespace(_scaled_mm=scaled_mm)
    monkeypatch.setitem(sys.modules, "torch with a product", product)
    monkeypatch.setattr(cases.load("fp8_gemm_nt"), "CUBLAS", Library("cuBLASLt", ("torch with a product",)))


def probe_only(monkeypatch, shapes):
    for op in probe.probed():
        if op in shapes:
            monkeypatch.setattr(cases.load(op), "PROBED", shapes[op])
        else:
            monkeypatch.delattr(cases.load(op), "PROBED")


def a_small_cache(rows):
    pages = torch.zeros(rows // 64, 64, 1, 656, dtype=torch.uint8)
    dsa.write_kv_cache(torch.randn(rows, 576, dtype=torch.bfloat16) / 10, pages, torch.arange(rows))
    return pages


def scaled_mm(a, b, scale_a, scale_b, out_dtype):
    wide = scale_b.repeat_interleave(128, 0).repeat_interleave(128, 1)[:, : b.shape[1]]
    return (a.float() * scale_a.repeat_interleave(128, 1) @ (b.float() * wide)).to(out_dtype)


WITH_SELECTED_KEYS = "window_attention_cast", [(512, 64, 8, 128)]


@pytest.mark.slow
@pytest.mark.parametrize(("op", "shapes"), [*SHAPES.items(), WITH_SELECTED_KEYS])
def test_every_peer_is_called_as_it_demands_and_agrees(op, shapes, monkeypatch, peers, small):
    probe_only(monkeypatch, {op: shapes})
    found = list(probe.outcomes())
    assert all(outcome == "ok" for *_, outcome in found), found
    assert {name for _, _, name, _ in found} == EVERYONE[op]


def test_every_benchmark_with_peers_says_what_is_probed():
    sources = {op: Path(cases.load(op).__file__).read_text() for op in cases.benchmarks()}
    with_peers = {op for op, source in sources.items() if "from dsa_bench.peers import " in source}
    assert probe.probed().keys() == with_peers
    for op, shapes in probe.probed().items():
        assert len({len(shape) for shape in shapes}) == 1, op
    # Benchmarks with reference=False are not in SHAPES. Their probe runs our kernels, which need a GPU.
    without_reference = {op for op, source in sources.items() if "reference=False" in source}
    assert SHAPES.keys() == with_peers - without_reference and without_reference == {"sparse_mla_attention"}


def test_without_peers_the_probe_only_names_missing_libraries(no_peers, small, capsys, monkeypatch):
    probe_only(monkeypatch, {"fp8_mqa_logits": [(16, 64, 32, 32, True)]})
    assert probe.main() == 0
    names = ["sgl-flash-mla", "flashmla", "deepgemm 2.8.1", "deepgemm", "vllm", "sglang", "marlin"]
    names += ["deepselect", "tile-kernels", "cuDNN-FE"]
    assert capsys.readouterr().out.splitlines() == [f"{name}: not installed" for name in names]


def test_the_probe_says_what_is_wrong(peers, small, capsys, monkeypatch):
    def refuse(*arguments, **options):
        raise RuntimeError("Unsupported arch\nand a stack")

    right = peers[NEW].fp8_fp4_mqa_logits
    peers[NEW].fp8_fp4_mqa_logits = lambda *arguments: right(*arguments).roll(1, 1)
    peers[OLD].fp8_mqa_logits = refuse
    del peers["cudnn"].DSA
    probe_only(monkeypatch, {"fp8_mqa_logits": [(16, 64, 32, 32, False)]})
    assert probe.main() == 1
    lines = {line[:28].strip(): line for line in capsys.readouterr().out.splitlines()}
    assert "differs by " in lines["deepgemm 2.8.1"] and lines["deepgemm"].endswith("failed: Unsupported arch")
    assert lines["cuDNN-FE"].endswith("failed: module 'cudnn' has no attribute 'DSA'")


@pytest.mark.slow
def test_the_probe_goes_on_where_ours_fails(peers, small, capsys, monkeypatch):
    monkeypatch.setattr(cases.load("merge_attention"), "fresh", lambda *arguments: 1 / 0)
    assert probe.main(["merge_attention", "per_token_cast_to_fp8"]) == 1
    first, *rest = capsys.readouterr().out.splitlines()
    assert first.startswith("dsa ") and first.endswith("failed: division by zero")
    assert len(rest) == 4 and all(line.endswith(" ok") for line in rest)
    with pytest.raises(ValueError, match=r"ops: must be of .*, got nothing"):
        probe.main(["nothing"])


def test_a_top_k_that_takes_contiguous_scores_gets_copies(peers):
    padded, lengths = torch.randn(3, 2600)[:, :2500], torch.full((3,), 2500, dtype=torch.int32)
    found = topk.select([(padded, lengths, 2048)])
    whole = topk.select([(padded.contiguous(), lengths, 2048)])
    assert found.calls.keys() == whole.calls.keys() >= {"vllm persistent", "vllm cooperative"} and not found.failed
    for name, (call,) in found.calls.items():
        assert torch.equal(call(), whole.calls[name][0]()), name


def test_products_of_every_build_are_compiled_once_sorted_by_rows(peers, monkeypatch, in_threads):
    """A contiguous product pads each expert's rows to a multiple of 128. Only the newer build has a masked product. It
    gives each expert 128 rows, and is left out if an expert has more. The stubs fail in every call, and the failures
    are ignored."""
    called = []

    def refuse(build, a, b, d, *rest):
        called.append((build, *d.shape))
        raise RuntimeError

    for build in (OLD, NEW):
        for name in ("fp8_gemm_nt", "m_grouped_fp8_gemm_nt_contiguous", "m_grouped_fp8_gemm_nt_masked"):
            monkeypatch.setattr(peers[build], name, partial(refuse, build), raising=False)
    deep_gemm.compile_products([(8, 256, 128), (1, 512, 128), (8, 256, 128), (1, 256, 128)], "cpu")
    deep_gemm.compile_products([(3, 192, 256, 4, 4)] * 2, "cpu")
    deep_gemm.compile_products([(200, 192, 256, 4, 4)], "cpu", (deep_gemm.NEW,))
    assert called == [
        *((build, *shape) for shape in ((1, 256), (1, 512), (8, 256)) for build in (NEW, OLD)),
        *((NEW, 512, 192), (NEW, 4, 128, 192), (OLD, 512, 192)),
        (NEW, 1024, 192),
    ]
    assert in_threads == [3, 1, 1]


def test_without_deep_gemm_nothing_is_compiled(no_peers, in_threads):
    deep_gemm.compile_products([(1, 128, 128)])
    deep_gemm.compile_products([(1, 128, 128, 2, 1)])
    assert in_threads == []
