"""vLLM's FLASHMLA_SPARSE implementation with the plugin's subclass."""

import types

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

import dsa
from dsa.testing import assert_close
from dsa_engines.vllm import seams
from tests.engines.sglang.batches import attention
from tests.engines.vllm import engine
from tests.engines.vllm.engine import PAGE, int32, needs_vllm, slots_of

pytestmark = needs_vllm
PAGES, TOPK, SCALE, D = 24, 128, 0.5, 576


@pytest.fixture
def sparse(plugin, monkeypatch):
    """Return vLLM's module of the backend, with PyTorch functions in place of kernels."""
    torch.manual_seed(0)
    module = __import__(seams.FLASHMLA_SPARSE, fromlist=["_"])
    monkeypatch.setattr(module, "triton_convert_req_index_to_global_index", engine.to_slots)
    monkeypatch.setattr(module, "triton_filter_and_convert_dcp_index", engine.to_slots)
    monkeypatch.setattr(module, "current_workspace_manager", engine.workspaces)
    monkeypatch.setattr(module.ops, "cp_gather_and_upconvert_fp8_kv_cache", engine.upconvert)
    monkeypatch.setattr(module.ops, "concat_mla_q", concat)
    return module


def concat(nope, rope, out):
    """Stands in for vLLM's kernel concat_mla_q, which leaves further heads of `out` unchanged."""
    out[:, : nope.shape[1]] = torch.cat([nope, rope], -1)


class Batch:
    """`next_n` queries for each of `decodes` sequences, followed by prompts [(tokens, length)]. A prompt's last
    `tokens` tokens are queries.

    `pages` has the keys in FP8 or bf16, and `rows` has them as they are read back. `selected` [T, TOPK] has the
    positions that each query selects, -1 after the last.
    """

    def __init__(self, heads, fp8, decodes, next_n, prompts=()):
        kv, slots = torch.randn(PAGES * PAGE, D) / 10, torch.arange(PAGES * PAGE)
        self.pages = torch.zeros(PAGES, PAGE, 656, dtype=torch.uint8) if fp8 else kv.bfloat16().view(PAGES, PAGE, D)
        if fp8:
            dsa.write_kv_cache(kv, self.pages.unsqueeze(2), slots)
        self.rows = dsa.read_kv_cache(self.pages.unsqueeze(2), slots) if fp8 else kv.bfloat16()
        self.table = torch.randperm(PAGES).view(decodes + len(prompts), -1).int()
        self.requests = [b for b in range(decodes) for _ in range(next_n)]
        lengths = [300 + 70 * b - next_n + 1 + i for b in range(decodes) for i in range(next_n)]
        for b, (tokens, length) in enumerate(prompts, start=decodes):
            self.requests += [b] * tokens
            lengths += range(length - tokens + 1, length + 1)
        self.tokens, self.decode_tokens = len(lengths), decodes * next_n
        self.q = torch.randn(self.tokens, heads, D).bfloat16()
        chosen = [torch.randperm(n)[:TOPK] for n in lengths]
        self.selected = pad_sequence(chosen, batch_first=True, padding_value=-1).int()

    def metadata(self, **more):
        """Return vLLM's metadata: the fields that every path reads, and `more`."""
        common = {"block_table": self.table, "req_id_per_token": int32(self.requests), "block_size": PAGE}
        common |= {"num_decode_tokens": self.decode_tokens, "num_actual_tokens": self.tokens}
        return types.SimpleNamespace(**common | more)

    def run(self, impl, metadata, q=None, pages=None):
        impl.topk_indices_buffer = self.selected
        q, pages = self.q if q is None else q, self.pages if pages is None else pages
        out, lse = impl.forward_mqa(q, pages, metadata, None)
        assert out.shape == (metadata.num_actual_tokens, self.q.shape[1], 512)
        return out, lse

    def check(self, out):
        slots = engine.to_slots(int32(self.requests), self.table, self.selected)
        expected, *_ = attention(self.q, self.rows, slots, SCALE)
        assert_close("out", out, expected, abs_tol=1e-3, rel_tol=3.01 / 128, cos_tol=7e-6)


def implementation(module, heads, cache, ranks=1, rank=0, tokens=64):
    from dsa_engines.vllm.backend import DSASparseImpl

    impl = object.__new__(DSASparseImpl)
    padded = -(-heads // 64) * 64
    shapes = [(tokens, padded if cache == "auto" else heads, D), (2048, D)]
    shapes += [(tokens, padded, D), (tokens, padded, 512), (tokens, heads, 512)]
    vars(impl).update(
        num_heads=heads,
        softmax_scale=SCALE,
        kv_cache_dtype=cache,
        q_head_size=D,
        kv_lora_rank=512,
        dcp_world_size=ranks,
        dcp_rank=rank,
        need_to_return_lse_for_decode=ranks > 1,
        pcp_dcp_kv_gather=False,
        index_group=None,
        prefill_padding=64,
        workspace_specs=[(shape, torch.bfloat16) for shape in shapes],
    )

    def convert(indices, metadata, *, block_stride_rows, return_valid_counts):
        requests = metadata.req_id_per_token[: len(indices)]
        return engine.to_slots(
            requests, metadata.block_table, indices, 64, block_stride_rows, return_valid_counts=return_valid_counts
        )

    impl._convert_logical_to_physical_topk = convert
    return impl


@pytest.mark.parametrize("as_tuple", [False, True])
@pytest.mark.parametrize("heads", [8, 128])
@pytest.mark.parametrize("next_n", [1, 2, 3, 4])
def test_prompts_and_decoding_over_bytes(sparse, next_n, heads, as_tuple):
    """Test the path for FP8 caches that separates prompts and decoding. Without the plugin, vLLM uses it only from 32
    heads on."""
    batch = Batch(heads, True, 2, next_n, [(7, 200), (3, 90)])
    tokens, decode_tokens = batch.tokens, batch.decode_tokens
    kind = sparse.FlashMLASparseMetadata
    prefill = kind.FP8SeparatePrefillDecode.Prefill
    starts = int32([0, 200])
    chunk = prefill.Chunk(
        tokens_slice=slice(decode_tokens, tokens),
        block_table=batch.table[2:],
        req_start_idx=0,
        workspace_starts=starts,
        chunk_tot_seqlen=290,
    )
    plan = sparse.FlashMLASchedMeta()
    decode = kind.FP8SeparatePrefillDecode.Decode(
        seq_lens=int32([300, 370]),
        kernel_metadata=kind.FP8KernelMetadata(plan, torch.empty(2, 1, dtype=torch.int32), int32([4096, 4096])),
        decode_query_len=next_n,
    )
    metadata = batch.metadata(
        fp8_use_mixed_batch=False,
        fp8_extra_metadata=kind.FP8SeparatePrefillDecode(
            num_prefills=2,
            num_decodes=2,
            num_prefill_tokens=tokens - decode_tokens,
            num_decode_tokens=decode_tokens,
            decode=decode,
            prefill=prefill(int32([-1] * decode_tokens + [0] * 7 + [1] * 3), starts, [chunk]),
        ),
    )
    impl = implementation(sparse, heads, "fp8_ds_mla")
    out, lse = batch.run(impl, metadata, batch.q.split([512, 64], -1) if as_tuple else batch.q)
    assert lse is None
    batch.check(out)
    # In a batch without prompts, vLLM does not copy the result to its buffer.
    metadata.num_actual_tokens = decode_tokens
    metadata.fp8_extra_metadata.num_prefill_tokens = 0
    alone, _ = batch.run(impl, metadata, batch.q[:decode_tokens])
    assert torch.equal(alone, out[:decode_tokens])


@pytest.mark.parametrize("heads", [16, 64])
def test_bf16_keys(sparse, heads):
    """vLLM pads queries to a multiple of 64 heads. The padding heads are not read."""
    batch = Batch(heads, False, 2, 2, [(5, 77)])
    for given in (batch.q, batch.q.split([512, 64], -1)):
        out, lse = batch.run(implementation(sparse, heads, "auto"), batch.metadata(), given)
        assert lse is None
        batch.check(out)


def of_one_batch(sparse):
    return {
        "fp8_use_mixed_batch": True,
        "fp8_extra_metadata": sparse.FlashMLASparseMetadata.FP8KernelMetadata(sparse.FlashMLASchedMeta(), None, None),
    }


@pytest.mark.parametrize("next_n", [1, 3])
def test_ranks_that_share_keys(sparse, next_n):
    """In decode context parallelism, every rank attends to its part of the keys in one mixed batch. The results are
    merged by LSE. If a rank has no selected key of a query, its result has weight 0."""
    ranks, heads = 2, 16
    whole, parts = Batch(heads, True, 2, next_n), []
    first = whole.selected[0]
    whole.selected[0] = torch.where(first % 2 == 0, first, -1)
    for rank in range(ranks):
        pages = torch.zeros_like(whole.pages)
        for request in range(2):
            slots = slots_of(whole.table, request, 12 * PAGE)[rank::ranks]
            own = slots_of(whole.table, request, len(slots))
            pages.view(-1, 656)[own] = whole.pages.view(-1, 656)[slots]
        metadata = whole.metadata(cp_kv_cache_interleave_size=1, **of_one_batch(sparse))
        out, lse = whole.run(implementation(sparse, heads, "fp8_ds_mla", ranks, rank), metadata, pages=pages)
        assert out.is_contiguous() and lse.shape == (whole.tokens, heads)
        parts.append((out.double(), lse.double()))
    (out0, lse0), (out1, lse1) = parts
    assert (lse1[0] == -torch.inf).all() and not out1[0].any()
    share = torch.sigmoid(lse0 - lse1)[..., None]
    whole.check(share * out0 + (1 - share) * out1)


def test_a_mixed_batch_of_one_rank(sparse):
    """Below 32 heads, vLLM uses a mixed batch for FP8 caches. With the plugin, only several ranks use it."""
    batch = Batch(16, True, 2, 1, [(4, 60)])
    batch.selected[1] = -1
    out, _ = batch.run(implementation(sparse, 16, "fp8_ds_mla"), batch.metadata(**of_one_batch(sparse)))
    assert not out[1].any()
    batch.check(out)
