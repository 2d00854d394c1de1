"""Models on the peers' kernels: the ops that are replaced, and results that stay the same."""

import sys
import types

import pytest
import torch

import dsa
from dsa.reference.mla import mha_varlen_fwd as reference
from dsa.testing import calc_diff
from dsa_bench.e2e import peer_experts
from dsa_bench.e2e import peers as peer_ops
from dsa_bench.e2e.peer_experts import Slots, padded, weight_of
from dsa_bench.e2e.runs import decode, prefill
from dsa_bench.peers import marlin
from dsa_layers.batch.decode_batch import DecodeBatch
from dsa_layers.engine import paged_attention
from dsa_layers.engine.attention_form import HeadSizes
from dsa_layers.engine.layer_pass import LayerPass
from dsa_layers.engine.paged_attention import PagedAttention
from dsa_layers.engine.paged_indexer import PagedSelection
from dsa_layers.layers import key_selection
from dsa_layers.layers.experts import Experts
from tests.bench import peer_stubs
from tests.bench.small_stacks import small_stack

VLLM_OPERATORS = "vllm/_C_stable_libtorch.abi3.so"
NEWEST = ("vllm.third_party.deep_gemm", "flash_mla")


def current():
    names = ("topk_indices", "mha_varlen_fwd", *(name for _, ops in peer_ops._GROUPS for name in ops))
    ops = {name: getattr(dsa, name) for name in names} | {"form": paged_attention.multi_head_is_faster}
    return ops | {"Experts": Experts.forward, "many keys": key_selection.FUSED_KEYS}


def test_peers_replace_our_ops_within_the_block(peers):
    ours, lengths = current(), ([4096], [4096], 2048, HeadSizes(128, 128, 64, 128, 512))
    assert paged_attention.multi_head_is_faster(*lengths)
    with pytest.raises(KeyError), peer_ops.peer_kernels() as replaced:
        assert not paged_attention.multi_head_is_faster(*lengths)  # attention runs in the absorbed form
        assert {*replaced.ops, "form", "many keys"} == ours.keys() | {"FP4 experts"} and replaced.failed == {}
        assert replaced.libraries == ["deepgemm 2.8.1", "sgl-flash-mla", "torch", "vllm"]
        assert all(op is not ours[name] for name, op in current().items())
        raise KeyError
    assert current() == ours


def test_an_older_build_replaces_a_broken_newer_build(peers, monkeypatch, tmp_path):
    (tmp_path / "deep_gemm.py").write_text("raise OSError('libcuda')")
    third_party = types.ModuleType("vllm.third_party")
    third_party.__path__ = [str(tmp_path)]
    monkeypatch.setitem(sys.modules, "vllm.third_party", third_party)
    monkeypatch.delitem(sys.modules, "vllm.third_party.deep_gemm")
    monkeypatch.setitem(sys.modules, "flash_mla", None)
    with peer_ops.peer_kernels() as replaced:
        assert replaced.libraries == ["deepgemm", "flashmla", "torch", "vllm"]
        assert replaced.failed == {"deepgemm 2.8.1": "failed: libcuda"}


def test_without_peers_nothing_is_replaced(no_peers):
    ours = current()
    with peer_ops.peer_kernels() as replaced:
        assert current() == ours and not replaced.ops and not replaced.failed


def test_ops_without_a_peer_stay_ours(peers, installed, monkeypatch):
    for file in ("_C_stable_libtorch.abi3.so", "_moe_C_stable_libtorch.abi3.so"):
        (installed / "vllm" / file).unlink()
    for name in ("deep_gemm", "vllm.third_party.deep_gemm"):
        monkeypatch.setitem(sys.modules, name, None)
    fused, experts, arguments = key_selection.FUSED_KEYS, fp4_experts(), of_experts(3)
    expected = experts(*arguments)
    with peer_ops.peer_kernels() as replaced:
        assert "sgl-flash-mla" in replaced.libraries and key_selection.FUSED_KEYS == fused
        assert torch.equal(experts(*arguments), expected) and "FP4 experts" not in replaced.ops


@pytest.fixture(params=["newest", "older"])
def either_build(request, peers, monkeypatch):
    for name in NEWEST if request.param == "older" else ():
        monkeypatch.setitem(sys.modules, name, None)


@pytest.fixture(params=["vLLM's", "ours"])
def either_top_k(request, installed):
    """Run a test twice: with vLLM's top-k, and with our top-k because vLLM's library is missing."""
    if request.param == "ours":
        (installed / VLLM_OPERATORS).unlink()


def same_with_peers(call):
    expected = call()
    with peer_ops.peer_kernels():
        got = call()
    torch.testing.assert_close(got, expected, rtol=1e-2, atol=1e-2)


def fp8(*shape):
    return torch.randn(shape).to(torch.float8_e4m3fn)


def bf16(*shape):
    return torch.randn(shape, dtype=torch.bfloat16) / 10


@pytest.mark.parametrize(("paged", "most"), [(False, 0), (True, 7)])
def test_selections_of_packed_sequences(paged, most, either_build, either_top_k):
    """In DeepGEMM 2.8.1, column 0 of a row of scores belongs to the first key in the row's range."""
    q, kv, weights = fp8(12, 32, 32), (fp8(48, 32), torch.rand(48) + 0.5), torch.rand(12, 32)
    sequences = torch.arange(12) % 3
    starts = torch.tensor([0, 7, 31], dtype=torch.int32)[sequences]
    lengths, paging = torch.full((12,), 5, dtype=torch.int32), {}
    if paged:
        table = torch.randperm(6, dtype=torch.int32).view(3, 2)
        paging = {"block_table": table, "page_size": 4, "row_to_seq": sequences.int()}

    def selected():
        options = {"clean_logits": False, "max_seqlen_k": most}
        scores = dsa.fp8_mqa_logits(q, kv, weights, starts, starts + lengths, **options)
        begins = None if most else starts
        return dsa.topk_indices(scores, 3, starts=begins, lengths=lengths, **paging).sort(1).values

    same_with_peers(selected)


def test_selections_from_many_keys_are_two_ops_of_the_peers(either_build, either_top_k, monkeypatch, recorded):
    """No peer fuses scores with selection, so `indexer_select` runs only without the peers."""
    keys, tokens = 60, 12
    monkeypatch.setattr(key_selection, "FUSED_KEYS", keys)
    monkeypatch.setattr(key_selection, "FUSED_TOKENS", tokens)
    fused = recorded(dsa, "indexer_select")
    q, kv, weights = fp8(tokens, 32, 32), (fp8(keys, 32), torch.rand(keys) + 0.5), torch.rand(tokens, 32)
    starts, lengths = torch.zeros(tokens, dtype=torch.int32), torch.arange(keys - tokens + 1, keys + 1).int()

    def selected():
        selection = key_selection.KeySelection(3, accumulators=torch.float16)
        return selection.select_packed(q, kv, weights, (starts, lengths, keys)).sort(1).values

    same_with_peers(selected)
    assert len(fused) == 1
    selected()
    assert len(fused) == 2


def test_selections_from_pages(either_build, either_top_k, monkeypatch):
    monkeypatch.setattr(dsa, "num_sms", lambda device: peer_stubs.SMS)
    pages = torch.zeros(4, 64, 1, 68, dtype=torch.uint8)
    dsa.write_indexer_cache(fp8(256, 64), torch.rand(256) + 0.5, pages, torch.arange(256))
    table, lengths = torch.tensor([[3, 1], [0, 2]], dtype=torch.int32), torch.tensor([70, 128], dtype=torch.int32)
    q, weights = fp8(2, 32, 64), torch.rand(2, 32)

    def selected():
        batch = DecodeBatch(table, 64, lengths, 128)
        selection = PagedSelection(8)
        selection.pages = lambda step: pages
        return selection._select_in_pages(q, weights, batch, LayerPass(batch, None, in_pages=True)).sort(1).values

    same_with_peers(selected)


@pytest.mark.parametrize(
    ("rows", "columns", "k", "prompt", "named"),
    [
        (2, 4096, 2048, False, "cooperative_topk"),
        (65, 4096, 512, False, "persistent_topk"),
        (65, 4096, 512, True, "top_k_per_row_prefill"),
        (65, 65536, 512, True, "persistent_topk"),
        (2, 4096, 100, False, "top_k_per_row_decode"),
    ],
)
def test_the_fastest_of_vllms_top_k_kernels_is_taken(rows, columns, k, prompt, named, peers, recorded):
    scores = torch.rand(rows, columns).argsort(1).float()  # no ties within a row
    lengths, options = torch.full((rows,), columns, dtype=torch.int32), {}
    if prompt:
        options = {"starts": torch.zeros_like(lengths)}
        scores.begins, scores.at_zero = options["starts"], True
    with peer_ops.peer_kernels():
        calls = recorded(torch.ops._C, named)
        found = dsa.topk_indices(scores, k, lengths=lengths, **options)
    assert len(calls) == 1 and torch.equal(found.long().sort().values, scores.topk(k).indices.sort().values)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])  # the peers have only bf16; fp32 stays ours
def test_products(dtype, either_build):
    a, b = (fp8(5, 256), torch.rand(5, 2) + 0.5), (fp8(192, 256), torch.rand(2, 2) + 0.5)
    same_with_peers(lambda: dsa.fp8_gemm_nt(a, b, dtype))


def test_attention_to_selected_keys(either_build):
    q, kv, topk_indices = bf16(6, 64, 576), bf16(300, 1, 576), torch.randint(-1, 300, (6, 1, 128), dtype=torch.int32)
    same_with_peers(lambda: dsa.flash_mla_sparse_fwd(q, kv, topk_indices, 0.1, 512)[0])


def test_windows(either_build):
    q, kv, compressed, sink = bf16(140, 64, 512), bf16(140, 1, 512), bf16(40, 1, 512), torch.randn(64)
    ends = torch.tensor([0, 50, 140], dtype=torch.int32)
    near, topk_indices = dsa.window_indices(ends, ends, 140, 16), torch.randint(-1, 40, (140, 32), dtype=torch.int32)
    common, angles = (q, kv, ends, ends, 16), torch.rand(140, 32)
    same_with_peers(lambda: dsa.sliding_window_attention(*common, 0.05, 512, sink, indices=near))
    both = (*common, compressed, topk_indices, 0.05, 512, sink)
    same_with_peers(lambda: dsa.window_sparse_attention(*both, window_indices=near))
    for entries in ((None, None), (compressed, topk_indices)):
        arguments = (*common, *entries, angles.cos(), angles.sin(), 8, 0.05, sink)

        def blocks(arguments=arguments):
            values, scale = dsa.window_attention_cast_to_fp8(*arguments, window_indices=near)
            return values.float().unflatten(1, (-1, 128)) * scale[..., None]

        same_with_peers(blocks)


def flash_attention(q, k, v, cu_q, cu_k, most_q, most_k, dropout, causal, debug, *, scale):
    """Replaces PyTorch's FlashAttention operator, which exists only on GPUs."""
    assert q.shape[1:] == k.shape[1:] == v.shape[1:] and (dropout, debug) == (0.0, False)
    assert most_q >= cu_q.diff().max() and most_k == cu_k.diff().max()
    return *reference.mha_varlen_fwd(q, k, v, cu_q, cu_k, most_k, scale, causal), None, None, None


@pytest.mark.parametrize("first", [2, 7])
def test_attention_to_all_keys_of_prompts(first, either_build, monkeypatch):
    """Prompts of different lengths run on FlashAttention. Others run on cuDNN; on a CPU, on PyTorch's math kernel."""
    monkeypatch.setattr(peer_ops, "_flash_attention", flash_attention)
    q, k, v, rope = bf16(first + 7, 2, 192), bf16(14, 2, 128), bf16(14, 2, 128), bf16(14, 64)
    cu_q, cu_k = (torch.tensor(ends, dtype=torch.int32) for ends in ([0, first, first + 7], [0, 7, 14]))
    same_with_peers(lambda: dsa.mha_varlen_fwd(q, k, v, cu_q, cu_k, 7, 0.1, k_rope=rope)[0])


def test_decoding_makes_a_plan_per_kind_of_call(either_build, recorded):
    q, pages = bf16(2, 1, 64, 512), dsa.make_v4_cache(4, 64)
    dsa.write_kv_cache(bf16(256, 512), pages, torch.arange(256))
    indices = torch.randint(-1, 256, (2, 1, 64), dtype=torch.int32)
    extra = {"extra_k_cache": pages, "extra_indices_in_kvcache": indices.flip(0)}

    def decode(**options):
        common = {"is_fp8_kvcache": True, "indices": indices, "attn_sink": torch.ones(64), "softmax_scale": 0.05}
        return dsa.flash_mla_with_kvcache(q, pages, None, None, 512, None, **common, **options)

    same_with_peers(decode)
    same_with_peers(lambda: decode(**extra))
    module = sys.modules["flash_mla"] or sys.modules["vllm.third_party.flashmla.flash_mla_interface"]
    plans = recorded(module, "get_mla_metadata")
    with peer_ops.peer_kernels():
        for options in ({}, extra, {}, extra):
            decode(**options)
    assert len(plans) == 2


def test_dense_decoding_stays_ours(peers):
    q, pages = bf16(1, 1, 4, 576), bf16(2, 64, 1, 576)
    table, lengths = torch.tensor([[1, 0]], dtype=torch.int32), torch.tensor([100], dtype=torch.int32)
    same_with_peers(lambda: dsa.flash_mla_with_kvcache(q, pages, table, lengths, 512, dsa.get_mla_metadata()[0]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "either_build"),
    [("V3.2", "newest"), ("V3.2", "older"), ("V4-Flash", "newest")],
    indirect=["either_build"],
)
def test_whole_passes_have_the_same_logits_up_to_ties(name, either_build, monkeypatch):
    """The stack has 64 heads, because every build of FlashMLA accepts 64."""
    monkeypatch.setattr(peer_ops, "_flash_attention", flash_attention)
    monkeypatch.setattr(PagedAttention, "_has_multi_head_kernel", lambda self, x: True)
    monkeypatch.setattr(dsa, "num_sms", lambda device: peer_stubs.SMS)
    monkeypatch.setattr(peer_experts, "LEAST_TOKENS", 100)
    heads = {"num_attention_heads": 64, "index_topk": 128} | ({"num_key_value_heads": 64} if name == "V3.2" else {})
    model = small_stack(name, **heads)
    # The prompts of 160 tokens are longer than index_topk. The second one takes two passes.
    for run in (prefill(model, 2, 160, 200), prefill(model, 3, 40, 400), decode(model, 2, 300)):
        expected = run.launched()
        with peer_ops.peer_kernels():
            got = run.launched()
        assert calc_diff(got, expected) < 0.2
        assert torch.equal(run.launched(), expected)


def fp4_experts():
    return Experts(5, 256, 128, fp8=True, fp4=True, limit=0.5)


def of_experts(tokens):
    """Return (x, two experts per token, their weights). No token has the last of five experts."""
    chosen = torch.stack([torch.randperm(4)[:2] for _ in range(tokens)])
    return bf16(tokens, 256), chosen, torch.rand(tokens, 2)


@pytest.mark.parametrize(
    ("tokens", "fp4", "layouts"),
    [
        *((3, False, (1, 0, 0)), (4, False, (0, 1, 0)), (89, False, (0, 1, 0)), (90, False, (1, 0, 0))),
        *((1, True, (0, 0, 1)), (3, True, (0, 0, 1)), (89, True, (0, 0, 1)), (90, True, (1, 0, 0))),
    ],
)
def test_experts_take_the_layout_of_their_number_of_tokens(tokens, fp4, layouts, peers, monkeypatch, recorded):
    """layouts: the number of calls of `padded`, `Slots.of` and Marlin. Marlin has a larger tolerance, because its
    activations are bf16 and ours are FP8."""
    experts = Experts(5, 256, 128, fp8=True, fp4=fp4, limit=0.5 if fp4 else None)
    monkeypatch.setattr(peer_experts, "LEAST_TOKENS", 90)
    shared, residual = bf16(2, tokens, 256)
    for more in ((), (shared,), (shared, residual), (None, residual)):
        arguments = (*of_experts(tokens), *more)
        expected = experts(*arguments[:4])
        expected = expected if len(more) < 2 else residual + expected
        with peer_ops.peer_kernels():
            calls = recorded(peer_experts, "padded"), recorded(Slots, "of"), recorded(marlin, "experts_sum")
            got = experts(*arguments)
        assert tuple(map(len, calls)) == layouts
        assert calc_diff(got, expected) < (2e-3 if layouts[2] else 1e-4)


@pytest.mark.parametrize(
    ("experts", "dtype"),
    [
        ({"dtype": torch.bfloat16}, torch.bfloat16),
        ({"fp8": True, "fp4": True}, torch.float32),
        ({"fp8": True}, torch.bfloat16),  # 129 tokens are more than the 128 slots of an expert
    ],
)
def test_other_experts_are_ours(experts, dtype, peers):
    experts, (x, chosen, weights) = Experts(5, 256, 128, **experts), of_experts(129)
    expected = experts(x.to(dtype), chosen, weights)
    with peer_ops.peer_kernels():
        assert torch.equal(experts(x.to(dtype), chosen, weights), expected)


def test_weights_are_packed_once_and_the_widened_copy_is_freed(peers, recorded):
    experts, packed = fp4_experts(), recorded(marlin, "pack")
    wide = weight_of(experts, "down_proj")
    for _ in range(2):
        with peer_ops.peer_kernels():
            experts(*of_experts(3))
    assert len(packed) == 2 and weight_of(experts, "down_proj") is not wide
    assert torch.equal(weight_of(experts, "down_proj")[0].float(), wide[0].float())


def test_padded_rows_of_experts_begin_at_multiples_of_128():
    places, sources, groups = padded(torch.tensor([[1, 3], [3, 1], [1, 0]]), 4)
    assert places.tolist() == [[128, 256], [257, 129], [130, 0]]
    assert [sources[i].item() for i in (0, 128, 129, 130, 256, 257)] == [2, 0, 1, 2, 0, 1]
    assert groups.view(-1, 128).unique(dim=1).flatten().tolist() == [0, 1, 3, -1, -1] and len(groups) == 5 * 128
    places, _, groups = padded(torch.tensor([[200, 3]]), 256)
    assert places.tolist() == [[128, 0]] and groups.view(-1, 128)[:, 0].tolist() == [3, 200]
