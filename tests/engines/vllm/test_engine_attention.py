"""vLLM's own FLASHMLA_SPARSE implementation through the plugin's subclass: caches of bytes and of bf16, prompts and
decoding, heads as they are, and ranks that share keys."""

import types

import pytest
import torch

import dsa
from dsa.testing import assert_close
from dsa_engines.vllm import seams
from tests.engines.vllm import engine
from tests.engines.vllm.engine import PAGE, int32, needs_vllm, slots_of

pytestmark = needs_vllm
PAGES, TOPK, SCALE, D = 24, 128, 0.5, 576
TOLERANCE = {"abs_tol": 1e-3, "rel_tol": 3.01 / 128, "cos_tol": 7e-6}


@pytest.fixture
def sparse(plugin, monkeypatch):
    """vLLM's module of the backend."""
    torch.manual_seed(0)
    module = __import__(seams.FLASHMLA_SPARSE, fromlist=["_"])
    monkeypatch.setattr(module, "triton_convert_req_index_to_global_index", engine.to_slots)
    monkeypatch.setattr(module, "triton_filter_and_convert_dcp_index", engine.to_slots)
    monkeypatch.setattr(module, "current_workspace_manager", engine.workspaces)
    monkeypatch.setattr(module.ops, "cp_gather_and_upconvert_fp8_kv_cache", engine.upconvert)
    monkeypatch.setattr(module.ops, "concat_mla_q", concat)
    return module


def concat(nope, rope, out):
    """Into the first heads of a buffer that may have more: those hold what they held."""
    out[:, : nope.shape[1]] = torch.cat([nope, rope], -1)


class Keys:
    """Keys in pages of bytes or of bf16, as they are read back, and the formula over them."""

    def __init__(self, requests, fp8):
        kv, slots = torch.randn(PAGES * PAGE, D) / 10, torch.arange(PAGES * PAGE)
        self.pages = torch.zeros(PAGES, PAGE, 656, dtype=torch.uint8) if fp8 else kv.bfloat16().view(PAGES, PAGE, D)
        if fp8:
            dsa.write_kv_cache(kv, self.pages.unsqueeze(2), slots)
        self.rows = (dsa.read_kv_cache(self.pages.unsqueeze(2), slots) if fp8 else kv.bfloat16()).double()
        self.table = torch.randperm(PAGES).view(requests, -1).int()

    def attend(self, q, request, selected):
        """out [H, 512] of q [H, 576] over a request's selected tokens."""
        tokens = selected[selected >= 0]
        if not len(tokens):
            return torch.zeros(len(q), 512, dtype=torch.float64)
        keys = self.rows[slots_of(self.table, request, int(tokens.max()) + 1)[tokens.long()]]
        return (SCALE * q.double() @ keys.T).softmax(-1) @ keys[:, :512]


def implementation(module, heads, cache, ranks=1, rank=0, tokens=64):
    """The plugin's, as a layer has it."""
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


def selections(lengths):
    """[T, TOPK] of each query's tokens: fewer than there is room for, where it sees fewer."""
    rows = [torch.randperm(n)[:TOPK] for n in lengths]
    return torch.stack([torch.nn.functional.pad(row, (0, TOPK - len(row)), value=-1) for row in rows]).int()


def batch(keys, next_n, decodes, prompts):
    """(each query's request, each query's length) of `decodes` sequences and prompts [(tokens, length)]."""
    requests = [b for b in range(decodes) for _ in range(next_n)]
    lengths = [300 + 70 * b - next_n + 1 + i for b in range(decodes) for i in range(next_n)]
    for b, (tokens, length) in enumerate(prompts, start=decodes):
        requests += [b] * tokens
        lengths += range(length - tokens + 1, length + 1)
    return requests, lengths


@pytest.mark.parametrize("as_tuple", [False, True])
@pytest.mark.parametrize("heads", [8, 16, 128])
@pytest.mark.parametrize("next_n", [1, 2, 3, 4])
def test_prompts_and_decoding_over_bytes(sparse, next_n, heads, as_tuple):
    """The path that vLLM takes from 32 heads on, and with the plugin with fewer too."""
    prompts = [(7, 200), (3, 90)]
    keys = Keys(4, fp8=True)
    requests, lengths = batch(keys, next_n, 2, prompts)
    tokens, decode_tokens = len(requests), 2 * next_n
    q, selected = torch.randn(tokens, heads, D).bfloat16(), selections(lengths)
    kind = sparse.FlashMLASparseMetadata
    prefill = kind.FP8SeparatePrefillDecode.Prefill
    starts = int32([0, 200])
    chunk = prefill.Chunk(
        tokens_slice=slice(decode_tokens, tokens),
        block_table=keys.table[2:],
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
    metadata = types.SimpleNamespace(
        block_table=keys.table,
        req_id_per_token=int32(requests),
        block_size=PAGE,
        num_decode_tokens=decode_tokens,
        num_actual_tokens=tokens,
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
    impl.topk_indices_buffer = selected
    given = q.split([512, 64], -1) if as_tuple else q
    out, lse = impl.forward_mqa(given, keys.pages, metadata, None)
    assert out.shape == (tokens, heads, 512) and lse is None
    for t in range(tokens):
        assert_close("out", out[t], keys.attend(q[t], requests[t], selected[t]), **TOLERANCE)
    # Decoding alone, which writes to no buffer of the engine's.
    metadata.num_actual_tokens = decode_tokens
    metadata.fp8_extra_metadata.num_prefill_tokens = 0
    alone, _ = impl.forward_mqa(q[:decode_tokens], keys.pages, metadata, None)
    assert torch.equal(alone, out[:decode_tokens])


@pytest.mark.parametrize("heads", [16, 64])
def test_bf16_keys(sparse, heads):
    """The heads that the engine's buffer has beyond those of the layer are not read."""
    keys = Keys(3, fp8=False)
    requests, lengths = batch(keys, 2, 2, [(5, 77)])
    tokens = len(requests)
    q, selected = torch.randn(tokens, heads, D).bfloat16(), selections(lengths)
    metadata = types.SimpleNamespace(
        block_table=keys.table,
        req_id_per_token=int32(requests),
        block_size=PAGE,
        num_decode_tokens=4,
        num_actual_tokens=tokens,
    )
    impl = implementation(sparse, heads, "auto")
    impl.topk_indices_buffer = selected
    for given in (q, q.split([512, 64], -1)):
        out, lse = impl.forward_mqa(given, keys.pages, metadata, None)
        assert out.shape == (tokens, heads, 512) and lse is None
        for t in range(tokens):
            assert_close("out", out[t], keys.attend(q[t], requests[t], selected[t]), **TOLERANCE)


@pytest.mark.parametrize("next_n", [1, 3])
def test_ranks_that_share_keys(sparse, next_n):
    """Decode context parallelism: every rank attends to its own tokens, all in one batch; their LSE merges the parts.
    A query of whose tokens a rank has none counts for nothing there."""
    ranks, heads, whole = 2, 16, Keys(2, fp8=True)
    requests, lengths = batch(whole, next_n, 2, [])
    tokens = len(requests)
    q, selected = torch.randn(tokens, heads, D).bfloat16(), selections(lengths)
    selected[0] = torch.where(selected[0] % 2 == 0, selected[0], -1)  # rank 1 has none of these
    parts = []
    for rank in range(ranks):
        pages = torch.zeros_like(whole.pages)
        for request in range(2):
            slots = slots_of(whole.table, request, 12 * PAGE)[rank::ranks]
            own = slots_of(whole.table, request, len(slots))
            pages.view(-1, 656)[own] = whole.pages.view(-1, 656)[slots]
        kind = sparse.FlashMLASparseMetadata
        metadata = types.SimpleNamespace(
            block_table=whole.table,
            req_id_per_token=int32(requests),
            block_size=PAGE,
            num_decode_tokens=tokens,
            num_actual_tokens=tokens,
            cp_kv_cache_interleave_size=1,
            fp8_use_mixed_batch=True,
            fp8_extra_metadata=kind.FP8KernelMetadata(sparse.FlashMLASchedMeta(), None, None),
        )
        impl = implementation(sparse, heads, "fp8_ds_mla", ranks, rank)
        impl.topk_indices_buffer = selected
        out, lse = impl.forward_mqa(q, pages, metadata, None)
        assert out.is_contiguous() and out.shape == (tokens, heads, 512) and lse.shape == (tokens, heads)
        parts.append((out.double(), lse.double()))
    (out0, lse0), (out1, lse1) = parts
    assert (lse1[0] == -torch.inf).all() and not out1[0].any()
    share = torch.sigmoid(lse0 - lse1)[..., None]
    merged = share * out0 + (1 - share) * out1
    for t in range(tokens):
        assert_close("out", merged[t], whole.attend(q[t], requests[t], selected[t]), **TOLERANCE)


def test_a_mixed_batch_of_one_rank(sparse):
    """The path that vLLM takes below 32 heads, which the plugin leaves to decode context parallelism."""
    heads, keys = 16, Keys(3, fp8=True)
    requests, lengths = batch(keys, 1, 2, [(4, 60)])
    tokens = len(requests)
    q, selected = torch.randn(tokens, heads, D).bfloat16(), selections(lengths)
    selected[1] = -1
    metadata = types.SimpleNamespace(
        block_table=keys.table,
        req_id_per_token=int32(requests),
        block_size=PAGE,
        num_decode_tokens=2,
        num_actual_tokens=tokens,
        fp8_use_mixed_batch=True,
        fp8_extra_metadata=sparse.FlashMLASparseMetadata.FP8KernelMetadata(sparse.FlashMLASchedMeta(), None, None),
    )
    impl = implementation(sparse, heads, "fp8_ds_mla")
    impl.topk_indices_buffer = selected
    out, _ = impl.forward_mqa(q, keys.pages, metadata, None)
    assert not out[1].any()
    for t in range(tokens):
        assert_close("out", out[t], keys.attend(q[t], requests[t], selected[t]), **TOLERANCE)
