"""Windowed attention with a cast on the GPU: the bits of attention, rotation and cast one after the other."""

import pytest
import torch

import dsa
from dsa.testing import calc_diff, poison_free_memory

WINDOW = 128
# Queries and keys of sequences: empty, whole, chunks, without queries, without keys, with less keys than queries.
SEQUENCES = [(0, 0), (1, 1), (50, 50), (0, 30), (17, 300), (3, 0), (130, 130), (5, 2)]


def int32(values):
    return torch.as_tensor(values, dtype=torch.int32, device="cuda")


def inputs(heads=64, groups=8, dtype=torch.bfloat16, sequences=SEQUENCES, entries=700, k=100):
    """By name; the last two queries belong to no sequence. Heads are of every size."""
    ends = torch.tensor([(0, 0), *sequences]).cumsum(0)
    queries, keys = (ends[-1] + 2).tolist()
    angles, size = torch.rand(queries, 32, device="cuda") * 100, torch.logspace(-2, 1, keys, device="cuda")
    kv = torch.randn(keys, 1, 512, device="cuda") * size[torch.randperm(keys)][:, None, None]
    return {
        "q": (torch.randn(queries, heads, 512, device="cuda") / 10).to(dtype),
        "kv": kv.to(dtype),
        "cu_seqlens_q": int32(ends[:, 0]),
        "cu_seqlens_k": int32(ends[:, 1]),
        "window": WINDOW,
        "compressed": torch.randn(entries, 1, 512, device="cuda").to(dtype),
        "indices": torch.randint(-5, entries + 5, (queries, k), device="cuda").int(),
        "cos": angles.cos(),
        "sin": angles.sin(),
        "groups": groups,
        "softmax_scale": 512**-0.5,
        "attn_sink": torch.randn(heads, device="cuda"),
        "topk_length": torch.randint(-1, k + 2, (queries,), device="cuda").int(),
    }


def alone(given):
    return given | dict.fromkeys(("compressed", "indices", "topk_length"))


def apart(given, use_ue8m0=True):
    packed = [given[name] for name in ("q", "kv", "cu_seqlens_q", "cu_seqlens_k", "window")]
    softmax = (given["softmax_scale"], 512, given["attn_sink"])
    if given["compressed"] is None:
        out, _ = dsa.sliding_window_attention(*packed, *softmax)
    else:
        lists = given["compressed"], given["indices"]
        out, _ = dsa.window_sparse_attention(*packed, *lists, *softmax, given["topk_length"])
    out = dsa.apply_rotary(out, given["cos"], -given["sin"], interleaved=True, dims="last")
    heads = out.shape[1] // given["groups"]
    rows = out.unflatten(1, (given["groups"], heads)).transpose(0, 1).flatten(2).flatten(0, 1)
    return dsa.per_token_cast_to_fp8(rows, use_ue8m0)


def same(got, expected):
    """Bit for bit, NaN of any kind the same."""
    for g, e in zip(got, expected, strict=True):
        assert g.dtype == e.dtype and g.shape == e.shape and g.is_contiguous()
        torch.testing.assert_close(g.float(), e.float(), rtol=0, atol=0, equal_nan=True)


def check(given, use_ue8m0=True):
    poison_free_memory(mebibytes=64)
    same(dsa.window_attention_cast_to_fp8(**given, use_ue8m0=use_ue8m0), apart(given, use_ue8m0))


@pytest.mark.parametrize("use_ue8m0", [True, False])
@pytest.mark.parametrize(("heads", "groups"), [(33, 1), (48, 2), (64, 8), (80, 5), (128, 16), (128, 1), (192, 64)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_bits(dtype, heads, groups, use_ue8m0):
    given = inputs(heads, groups, dtype)
    check(given, use_ue8m0)
    check(alone(given), use_ue8m0)


@pytest.mark.parametrize("heads", [1, 8, 32])
def test_few_heads(heads):
    """Whose attention alone has another kernel, with another order of sums: a result may fall to the next number."""
    given = inputs(heads, 1)
    cast, scale = dsa.window_attention_cast_to_fp8(**given)
    expected, scales = apart(given)
    blocks = expected.float().unflatten(1, (-1, 128)) * scales[..., None]
    got = cast.float().unflatten(1, (-1, 128)) * scale[..., None]
    step = torch.maximum(scale, scales)[..., None]
    # A bf16 is off by up to 2^-7 of the largest values, and so now and then a byte by one.
    assert ((got - blocks).abs() <= blocks.abs() / 7 + step * 4).all()
    assert calc_diff(got, blocks) < 2e-3
    same((dsa.window_attention_cast_to_fp8(**given)), (cast, scale))


@pytest.mark.parametrize("heads", [64, 128])
@pytest.mark.parametrize("length", [131, 133, 3000])
def test_a_chunk(length, heads):
    """About as many queries as multiprocessors, and more; V4's numbers."""
    given = inputs(heads, 8, sequences=[(length, length + 5000)], entries=1250, k=512)
    near = dsa.window_indices(given["cu_seqlens_q"], given["cu_seqlens_k"], len(given["q"]), WINDOW)
    check(given)
    same(dsa.window_attention_cast_to_fp8(**given, window_indices=near), apart(given))


def test_no_keys():
    given = alone(inputs())
    zeros = given["q"].new_zeros(len(given["q"]) * 8, 8 * 512)
    for rest in ({"kv": given["kv"][:0], "cu_seqlens_k": torch.zeros_like(given["cu_seqlens_k"])}, {"attn_sink": None}):
        got = dsa.window_attention_cast_to_fp8(**(given | rest))
        same(got, dsa.per_token_cast_to_fp8(zeros) if "kv" in rest else apart(given | rest))


def test_nan_and_infinity_stay_in_their_rows():
    given = alone(inputs(sequences=[(300, 300)]))
    whole = dsa.window_attention_cast_to_fp8(**given)
    given["q"][7, 3] = torch.nan
    given["kv"][200] = torch.nan
    check(given)
    got = dsa.window_attention_cast_to_fp8(**given)
    tokens = [t for t in range(302) if t != 7 and not 200 <= t < 200 + WINDOW]
    rows = (torch.arange(8)[:, None] * 302 + torch.tensor(tokens)).flatten().cuda()
    same([x.view(torch.uint8)[rows] for x in got], [x.view(torch.uint8)[rows] for x in whole])


def test_strided_queries_and_angles():
    given = inputs()
    wide = torch.randn(len(given["q"]), 64, 520, device="cuda").bfloat16()
    for q in (wide[..., :512], wide[..., 8:], wide[..., 4:516]):
        check(given | {"q": q})
    angles = torch.rand(len(given["q"]), 80, device="cuda")
    check(given | {"cos": angles.cos()[:, 3:35], "sin": angles.sin()[:, 1:33]})


def test_offsets_beyond_32_bits():
    """Results of more than 2^31 bytes."""
    tokens = 2**31 // (128 * 512) + 40
    given = alone(inputs(128, 16, sequences=[(tokens, tokens)]))
    cast, scale = dsa.window_attention_cast_to_fp8(**given)
    rows = torch.arange(tokens - 300, tokens)
    last = {name: given[name][rows[0] : rows[-1] + 1].clone() for name in ("q", "cos", "sin")}
    last |= {"kv": given["kv"][rows[0] - WINDOW : rows[-1] + 1].clone()}
    last |= {"cu_seqlens_q": int32([0, 300]), "cu_seqlens_k": int32([0, 300 + WINDOW])}
    expected, scales = apart(given | last)
    places = (torch.arange(16)[:, None] * (tokens + 2) + rows).flatten().cuda()
    same((cast.view(torch.uint8)[places], scale[places]), (expected.view(torch.uint8), scales))


def test_a_query_does_not_depend_on_the_others():
    given = inputs(sequences=[(1, 400)] * 300)
    cast, scale = (x.view(torch.uint8).unflatten(0, (8, -1)) for x in dsa.window_attention_cast_to_fp8(**given))
    for begin, end in ((0, 1), (150, 151), (100, 117)):
        part = {name: given[name][begin:end] for name in ("q", "indices", "cos", "sin", "topk_length")}
        part |= {"cu_seqlens_q": int32(range(end - begin + 1)), "cu_seqlens_k": given["cu_seqlens_k"][begin : end + 1]}
        got = [x.view(torch.uint8).unflatten(0, (8, -1)) for x in dsa.window_attention_cast_to_fp8(**(given | part))]
        same(got, (cast[:, begin:end].contiguous(), scale[:, begin:end].contiguous()))


def test_twenty_runs_are_identical():
    given = inputs()
    first = dsa.window_attention_cast_to_fp8(**given)
    for _ in range(20):
        same(dsa.window_attention_cast_to_fp8(**given), first)


def test_graph_replay_with_new_data():
    given = inputs()
    near = dsa.window_indices(given["cu_seqlens_q"], given["cu_seqlens_k"], len(given["q"]), WINDOW)
    dsa.window_attention_cast_to_fp8(**given, window_indices=near)  # compile outside the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = dsa.window_attention_cast_to_fp8(**given, window_indices=near)
    for _ in range(3):
        for name, x in inputs().items():
            if isinstance(x, torch.Tensor):
                given[name].copy_(x)
        graph.replay()
        same(got, apart(given))


@pytest.mark.several_gpus
def test_tensors_on_another_gpu_than_the_current_one():
    given = inputs()
    expected = apart(given)
    moved = {name: x.to("cuda:1") if isinstance(x, torch.Tensor) else x for name, x in given.items()}
    with torch.cuda.device(0):
        got = dsa.window_attention_cast_to_fp8(**moved)
    same([x.cpu() for x in got], [x.cpu() for x in expected])


def test_torch_compile():
    given = inputs()
    compiled = torch.compile(dsa.window_attention_cast_to_fp8, fullgraph=True, backend="aot_eager")
    same(compiled(**given), apart(given))


def test_fp32_runs_the_reference_and_says_so():
    given = inputs(2, 1, torch.float32)
    dsa.backends._warned.discard("window_attention_cast_to_fp8 in float32")
    with pytest.warns(UserWarning, match="window_attention_cast_to_fp8 in float32 has no Hopper kernel"):
        dsa.window_attention_cast_to_fp8(**given)
