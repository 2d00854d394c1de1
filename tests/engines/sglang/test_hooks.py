"""The hooks that replace SGLang's functions, on the CPU, with stand-ins for SGLang's objects."""

import inspect
from types import SimpleNamespace

import pytest
import torch

import dsa
from dsa_engines.sglang import adapters, hooks, seams
from tests.engines.sglang import batches
from tests.engines.sglang.batches import BF16, E4M3, INT32, PAGE, int32

FP8_POOL = SimpleNamespace(
    kv_cache_dim=656, dsa_kv_cache_store_fp8=True, index_kpool=1, qk_rope_head_dim=64, dtype=E4M3
)
BF16_POOL = SimpleNamespace(**vars(FP8_POOL) | {"kv_cache_dim": 576, "dsa_kv_cache_store_fp8": False, "dtype": BF16})
OTHERS = {  # cache layouts without kernels
    "without rope": {"kv_cache_dim": 528, "qk_rope_head_dim": 0},
    "pools of keys": {"index_kpool": 4},
    "fp8 without scales": {"kv_cache_dim": 576, "dsa_kv_cache_store_fp8": False},
    "fp4": {"kv_cache_dim": 288},
    "other rope": {"qk_rope_head_dim": 32},
}


def pool_of(layout):
    return SimpleNamespace(**vars(FP8_POOL) | OTHERS[layout])


def backend_of(pool, **more):
    common = {"token_to_kv_pool": pool, "physical_page_size": PAGE, "kv_cache_dim": pool.kv_cache_dim, "num_splits": 0}
    return SimpleNamespace(**common | more)


def never(*args, **kwargs):
    raise AssertionError("SGLang's own function was called")


class Recorder:
    def __call__(self, *args, **kwargs):
        self.args, self.kwargs = args, kwargs
        return "SGLang's own"


def every_hook():
    for family in seams.SEAMS.values():
        for makers in family.values():
            for path, make in makers.items():
                is_plan = path.endswith("_compute_flashmla_metadata")
                yield path, hooks.compute_flashmla_metadata(SimpleNamespace) if is_plan else make()


@pytest.mark.parametrize(("path", "hook"), list(every_hook()), ids=[path.partition(":")[2] for path, _ in every_hook()])
def test_hooks_have_the_arguments_of_what_they_replace(path, hook):
    """After `original`, a hook has the replaced function's parameters. Only `self` may have another name."""
    first, *given = inspect.signature(hook).parameters
    assert first == "original"
    expected = seams.SIGNATURES[path]
    if expected[:1] == ["self"]:
        given, expected = given[1:], expected[1:]
    assert given == expected


def test_defaults_are_those_of_deep_gemm():
    parameters = inspect.signature(hooks.fp8_mqa_logits).parameters
    assert (parameters["clean_logits"].default, parameters["max_seqlen_k"].default) == (False, 0)
    assert inspect.signature(adapters.fp8_mqa_logits).parameters["clean_logits"].default is False


@pytest.mark.parametrize("next_n", [None, 1, 2, 3, 4, 5])
@pytest.mark.parametrize("verify", [False, True])
def test_draft_tokens_are_scored_together(next_n, verify):
    backend = SimpleNamespace(speculative_num_draft_tokens=next_n)
    mode, original = SimpleNamespace(is_target_verify=lambda: verify), Recorder()
    lengths, expanded = int32([10, 20]), int32(range(2 * (next_n or 1)))
    got = hooks.paged_mqa_schedule_2d_ctx_lens(original, backend, mode, lengths, expanded, 2)
    if verify and next_n in (2, 3, 4):
        assert got.tolist() == expanded.view(2, next_n).tolist() and got.is_contiguous()
    else:
        assert got == "SGLang's own" and original.args == (backend, mode, lengths, expanded, 2)


def method(name):
    return SimpleNamespace(name=name)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("forced", [False, True])
def test_selection_in_decoding(fused, forced):
    logits, lengths, metadata, expected = batches.decode_metadata([1, 70, 0, 200])
    hook = hooks.topk_transform(lambda: fused)
    got = hook(never, None, logits, lengths, 16, method("PAGED"), metadata, force_unfused_topk=forced)
    if fused and not forced:
        assert torch.equal(got, expected(16))
    else:
        assert torch.equal(got, adapters.topk(logits, lengths, 16))


@pytest.mark.parametrize("chunk", [None, slice(2, 9)])
def test_selection_in_prefill(chunk):
    logits, lengths, starts, metadata, expected = batches.prefill_metadata([0, 30, 5], [4, 36, 9])
    positions, owners = int32(expected(16)), metadata.token_to_batch_idx
    rows = slice(None) if chunk is None else chunk
    hook = hooks.topk_transform(lambda: True)
    given = {"row_starts": starts[rows], "batch_idx_list": None if chunk is None else owners[rows]}
    paged = hook(never, None, logits[rows], lengths[rows], 16, method("PAGED"), metadata, **given)
    table = metadata.real_page_table
    slots = table[owners.long()[:, None], positions.clamp(min=0).long() // PAGE] * PAGE + positions % PAGE
    assert torch.equal(paged, torch.where(positions < 0, -1, slots)[rows])
    given = {"row_starts": starts[rows], "topk_indices_offset": starts[rows]}
    ragged = hook(never, None, logits[rows], lengths[rows], 16, method("RAGGED"), metadata, **given)
    assert torch.equal(ragged, torch.where(positions < 0, -1, positions + starts[:, None])[rows])


def test_selection_names_an_argument_that_is_wrong():
    logits, lengths, metadata, _ = batches.decode_metadata([1, 70])
    hook = hooks.topk_transform(lambda: True)
    with pytest.raises(TypeError, match=r"row_to_seq: must be a torch\.Tensor, got list"):
        hook(never, None, logits, lengths, 16, method("PAGED"), metadata, batch_idx_list=[0, 1])
    with pytest.raises(ValueError, match="lengths"):
        hook(never, None, logits, lengths[:1], 16, method("PAGED"), metadata)
    for starts in (None, lengths - lengths):
        with pytest.raises(ValueError, match=r"topk_indices_offset: must be .* got None"):
            hook(never, None, logits, lengths, 16, method("RAGGED"), metadata, row_starts=starts)


def calls_of(monkeypatch, owner, name):
    """Record later calls of `owner.name`, which still runs. Return a list of (positional arguments, named
    arguments)."""
    calls, function = [], getattr(owner, name)

    def noted(*given, **options):
        calls.append((given, options))
        return function(*given, **options)

    monkeypatch.setattr(owner, name, noted)
    return calls


def close(got, want):
    return (got.double() - want).abs().max() < 2e-2


@pytest.mark.parametrize("pool", [FP8_POOL, BF16_POOL], ids=["fp8", "bf16"])
@pytest.mark.parametrize("splits", [0, 1])
def test_attention_in_decoding(pool, splits, monkeypatch):
    cache, rows = batches.latent_cache(pool.kv_cache_dim, 3)
    layer = SimpleNamespace(tp_q_head_num=8, head_dim=576)
    q, table = torch.randn(5, 8, 576).to(BF16), torch.randint(0, 192, (5, 32), dtype=INT32)
    table[1, 5:] = -1
    calls = calls_of(monkeypatch, adapters, "sparse_decode")
    want, *_ = batches.attention(q, rows, table, 0.1)
    # A batch that is padded for data parallelism can have fewer lengths than q has rows. The hook then ignores the
    # lengths.
    for lengths, given in ((int32([32, 5, 32, 32, 32]), True), (int32([32, 5]), False)):
        metadata = SimpleNamespace(dsa_cache_seqlens_int32=lengths)
        arguments = backend_of(pool, num_splits=splits), q.flatten(1), cache.flatten(1), 512, 0.1, layer, metadata
        got = hooks.forward_flashmla_kv(never, *arguments, table)
        assert got.shape == (5, 1, 8, 512) and close(got.squeeze(1), want)
        passed, options = calls[-1]
        assert passed[5] is (lengths if given else None) and options == {"batch_invariant": splits == 1}


@pytest.mark.parametrize("pool", [FP8_POOL, BF16_POOL], ids=["fp8", "bf16"])
@pytest.mark.parametrize("splits", [0, 1])
def test_attention_in_prefill(pool, splits, monkeypatch):
    q, kv = torch.randn(4, 16, 576).to(BF16), torch.randn(90, 1, 576).to(BF16)
    table, sink = torch.randint(0, 90, (4, 32), dtype=INT32), torch.randn(16)
    table[1, 5:] = -1
    given = {"q_all": q, "kv_cache": kv, "v_head_dim": 512, "page_table_1": table, "sm_scale": 0.1, "attn_sink": sink}
    want, *_ = batches.attention(q, kv.squeeze(1), table, 0.1, sink)
    calls = calls_of(monkeypatch, dsa, "flash_mla_sparse_fwd")
    for lengths in (None, int32([32, 5, 32, 32]), int32([1])):
        got = hooks.forward_flashmla_sparse(never, backend_of(pool, num_splits=splits), **given, topk_length=lengths)
        assert got.shape == (4, 16, 512) and close(got, want)
    assert [options for _, options in calls] == [{"enable_batch_invariant": splits == 1}] * 3


def test_plan_of_a_batch():
    make = SimpleNamespace
    got = hooks.compute_flashmla_metadata(make)(never, backend_of(FP8_POOL), cache_seqlens=int32([3, 4]), seq_len_q=1)
    assert got.flashmla_metadata.shape == (1, 8) and got.num_splits.tolist() == [0, 0, 0]


@pytest.mark.parametrize("layout", OTHERS)
def test_another_layout_is_left_to_sglang(layout):
    """The hooks are installed for a family's first model. A second model may have a cache of another layout."""
    backend, original = backend_of(pool_of(layout)), Recorder()
    for hook, count in (
        (hooks.forward_flashmla_sparse, 7),
        (hooks.forward_flashmla_kv, 7),
        (hooks.compute_flashmla_metadata(never), 2),
    ):
        arguments = tuple(range(count))
        assert hook(original, backend, *arguments) == "SGLang's own"
        assert original.args == (backend, *arguments) and original.kwargs == {}


def v4_call(width=584, extra=None, **more):
    cache, _ = batches.latent_cache(584, 2)
    given = {
        "q": torch.randn(3, 1, 8, 512).to(BF16),
        "k_cache": cache if width == 584 else torch.zeros(2, PAGE, 1, width, dtype=torch.uint8),
        "block_table": None,
        "cache_seqlens": None,
        "head_dim_v": 512,
        "tile_scheduler_metadata": object(),
        "is_fp8_kvcache": True,
        "indices": torch.randint(0, 128, (3, 1, 64), dtype=INT32),
        "attn_sink": torch.zeros(8),
        "topk_length": int32([64, 1, 0]),
    }
    if extra is not None:
        given["extra_k_cache"] = torch.zeros(1, 2, 1, extra, dtype=torch.uint8)
        given["extra_indices_in_kvcache"] = torch.full((3, 1, 64), -1, dtype=INT32)
    return given | more


@pytest.mark.parametrize("deterministic", [False, True])
def test_v4_attention_takes_sglangs_plan_object(deterministic, monkeypatch):
    given, calls = v4_call(extra=584), calls_of(monkeypatch, adapters, "sparse_decode")
    out, lse = hooks.flash_mla_with_kvcache(lambda: deterministic)(never, **given)
    assert [options for _, options in calls] == [{"batch_invariant": deterministic}]
    assert out.shape == (3, 1, 8, 512) and lse.shape == (3, 8, 1)
    q, cache, indices = given["q"], given["k_cache"], given["indices"]
    want = adapters.sparse_decode(q, cache, indices, 512, 512**-0.5, given["topk_length"], given["attn_sink"])
    assert torch.equal(out, want[0]) and torch.equal(lse, want[1])


@pytest.mark.parametrize(
    "given",
    [
        {"width": 528, "kv_format": "V41", "use_legacy": False},
        {"width": 288},
        {"extra": 288},
        {"width": 656},
        {"indices": None, "causal": True},
    ],
    ids=str,
)
def test_other_caches_and_dense_attention_are_left_to_sglang(given):
    original, given = Recorder(), v4_call(**given)
    assert hooks.flash_mla_with_kvcache(never)(original, **given) == "SGLang's own"
    names = seams.SIGNATURES[f"{seams.FLASH_MLA}:flash_mla_with_kvcache"][:-1]
    passed = dict(zip(names, original.args, strict=True)) | original.kwargs
    for name, value in passed.items():
        assert value is given.get(name, True if name == "use_legacy" else False if name == "causal" else None), name


def test_scores_of_chosen_rows_are_left_to_sglang():
    for hook, count in ((hooks.fp8_paged_mqa_logits, 8), (hooks.get_paged_mqa_logits_metadata, 3)):
        original, rows = Recorder(), int32([1])
        assert hook(original, *range(count), indices=rows) == "SGLang's own"
        assert original.args == (*range(count), rows)


def test_v4_hooks_of_functions():
    k, k_scale = batches.index_keys(70)
    q, weights, ends = torch.randn(2, 64, 128).to(E4M3), torch.randn(2, 64), int32([9, 70])
    got = hooks.fp8_mqa_logits(never, q, (k, k_scale), weights, ends * 0, ends, clean_logits=False, max_seqlen_k=128)
    assert got.shape == (2, 128) and (got[0, 9:] == -torch.inf).all()
    lengths = int32([[300], [5]])
    plans = [
        f(never, lengths, PAGE, 4)
        for f in (hooks.get_paged_mqa_logits_metadata, hooks.sglangs_paged_mqa_logits_metadata)
    ]
    assert plans[0].tolist() == plans[1].tolist() == [[0, 0], [0, 0], [0, 1], [1, 0], [2, 0]]
    logits, lengths, metadata, expected = batches.decode_metadata([1, 70, 200])
    for hook, plan in ((hooks.topk_transform_paged, ()), (hooks.topk_transform_paged_v2, (int32([0]),))):
        out, raw = (torch.full((3, 32), 7, dtype=INT32) for _ in range(2))
        hook(never, logits, lengths, metadata.real_page_table, out, PAGE, *plan, raw)
        assert torch.equal(out, expected(32)) and torch.equal(raw, adapters.topk(logits, lengths, 32))
    assert hooks.kernel_num_heads(never, SimpleNamespace(n_local_heads=16), 100) == 16


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("legacy", [False, True])
def test_v4_attention_in_prefill(legacy, deterministic, monkeypatch):
    q, kv, indices = torch.randn(2, 8, 512).to(BF16), torch.randn(9, 1, 512).to(BF16), torch.zeros(2, 1, 4, dtype=INT32)
    calls = calls_of(monkeypatch, dsa, "flash_mla_sparse_fwd")
    hook = hooks.flash_mla_sparse_fwd(lambda: deterministic)
    got = hook(never, q, kv, indices, sm_scale=0.1, d_v=512, use_legacy=legacy)
    assert [options for _, options in calls] == [{"enable_batch_invariant": deterministic}]
    assert all(map(torch.equal, got, adapters.sparse_prefill(q, kv, indices, 0.1, use_legacy=legacy)))
