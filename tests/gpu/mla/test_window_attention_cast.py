"""window_attention_cast_to_fp8 on the GPU has the bits of attention, rotation and cast as three separate ops, except
with at most 32 heads."""

import pytest
import torch

import dsa
from dsa.cases.attention import SEQUENCES
from dsa.cases.mla_windows import window_list
from dsa.testing import calc_diff
from tests.gpu.attention import case_of, checked, int32
from tests.gpu.op_checks import assert_equal

CASE = case_of("window_attention_cast_to_fp8")
WINDOW = 128


def inputs(heads=64, groups=8, sequences=SEQUENCES, **options):
    sizes = {"heads": heads, "groups": groups, "sequences": tuple(sequences), "window": WINDOW}
    given = CASE.arguments("cuda", **sizes, **options)
    count = len(given["kv"])
    given["kv"] *= torch.logspace(-2, 1, count, device="cuda")[torch.randperm(count)][:, None, None]
    return given


def alone(given):
    return given | dict.fromkeys(("compressed", "indices", "topk_length"))


def apart(given):
    packed = [given[name] for name in ("q", "kv", "cu_seqlens_q", "cu_seqlens_k", "window")]
    softmax = (given["softmax_scale"], 512, given["attn_sink"])
    if given["compressed"] is None:
        out, _ = dsa.sliding_window_attention(*packed, *softmax)
    else:
        lists = given["compressed"], given["indices"]
        out, _ = dsa.window_sparse_attention(*packed, *lists, *softmax, given["topk_length"])
    out = dsa.apply_rotary(out, given["cos"], -given["sin"], interleaved=True, dims="last")
    rows = out.unflatten(1, (given["groups"], -1)).transpose(0, 1).flatten(2).flatten(0, 1)
    return dsa.per_token_cast_to_fp8(rows, given["use_ue8m0"])


def check(given, record_error=None):
    assert_equal(checked(CASE, given, record_error), apart(given))


@pytest.mark.parametrize("use_ue8m0", [True, False])
@pytest.mark.parametrize(("heads", "groups"), [(33, 1), (48, 2), (64, 8), (80, 5), (128, 16), (128, 1), (192, 64)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_bits_are_those_of_three_ops(dtype, heads, groups, use_ue8m0, record_error):
    given = inputs(heads, groups, dtype=dtype, use_ue8m0=use_ue8m0)
    check(given, record_error)
    check(alone(given), record_error)


@pytest.mark.parametrize("heads", [1, 8, 32])
def test_few_heads_differ_by_the_order_of_sums(heads):
    """With at most 32 heads the separate attention op runs another kernel, which adds in another order. So a bf16
    result can round to the adjacent number."""
    given = inputs(heads, 1)
    (cast, scale), (expected, scales) = CASE.run(given), apart(given)
    blocks = expected.float().unflatten(1, (-1, 128)) * scales[..., None]
    got = cast.float().unflatten(1, (-1, 128)) * scale[..., None]
    step = torch.maximum(scale, scales)[..., None]
    # If a bf16 result differs by 2^-7, the e4m3 value sometimes differs by one step, at most 1/8 of the value.
    assert ((got - blocks).abs() <= blocks.abs() / 7 + step * 4).all()
    assert calc_diff(got, blocks) < 2e-3


@pytest.mark.parametrize("heads", [64, 128])
@pytest.mark.parametrize("length", [131, 133, 3000])
def test_a_chunk_has_the_same_bits(length, heads):
    """V4's sizes. An H200 has 132 SMs."""
    given = inputs(heads, 8, [(length, length + 5000)], entries=1250, top_k=512)
    check(given)
    assert_equal(CASE.run(given | {"window_indices": window_list(given)}), apart(given))


def test_without_keys_results_are_zero():
    given = alone(inputs())
    none = {"kv": given["kv"][:0], "cu_seqlens_k": torch.zeros_like(given["cu_seqlens_k"])}
    got = CASE.run(given | none)
    assert_equal(got, dsa.per_token_cast_to_fp8(given["q"].new_zeros(len(given["q"]) * 8, 8 * 512)))
    check(given | {"attn_sink": None})


def test_nan_stays_in_its_rows():
    given = alone(inputs(sequences=[(300, 300)]))
    whole = CASE.run(given)
    given["q"][7, 3] = given["kv"][200] = torch.nan
    got = CASE.run(given)
    assert_equal(got, apart(given))
    clean = [t for t in range(302) if t != 7 and not 200 <= t < 200 + WINDOW]
    rows = (torch.arange(8)[:, None] * 302 + torch.tensor(clean)).flatten().cuda()
    assert_equal([x.view(torch.uint8)[rows] for x in got], [x.view(torch.uint8)[rows] for x in whole])


def test_offsets_beyond_32_bits():
    tokens = 2**31 // (128 * 512) + 40
    given = alone(inputs(128, 16, [(tokens, tokens)]))
    cast, scale = CASE.run(given)
    rows = torch.arange(tokens - 300, tokens)
    last = {name: given[name][rows[0] : rows[-1] + 1].clone() for name in ("q", "cos", "sin")}
    last |= {"kv": given["kv"][rows[0] - WINDOW : rows[-1] + 1].clone()}
    last |= {"cu_seqlens_q": int32([0, 300]), "cu_seqlens_k": int32([0, 300 + WINDOW])}
    expected, scales = apart(given | last)
    places = (torch.arange(16)[:, None] * (tokens + 2) + rows).flatten().cuda()
    assert_equal((cast.view(torch.uint8)[places], scale[places]), (expected.view(torch.uint8), scales))


def test_a_query_does_not_depend_on_the_others():
    given = inputs(sequences=[(1, 400)] * 300)
    whole = [x.view(torch.uint8).unflatten(0, (8, -1)) for x in CASE.run(given)]
    for begin, end in ((0, 1), (150, 151), (100, 117)):
        part = {name: given[name][begin:end] for name in ("q", "indices", "cos", "sin", "topk_length")}
        part |= {"cu_seqlens_q": int32(range(end - begin + 1)), "cu_seqlens_k": given["cu_seqlens_k"][begin : end + 1]}
        got = [x.view(torch.uint8).unflatten(0, (8, -1)) for x in CASE.run(given | part)]
        assert_equal(got, [x[:, begin:end] for x in whole])
