"""Sparse MLA prefill on the GPU: heads, lists and lengths of every kind, NaN, extremes, strides."""

import math
from itertools import product

import pytest
import torch

import dsa
from dsa.cases.attention import PREFILL
from dsa.testing import assert_close, poison_free_memory
from tests.gpu.attention import (
    D_V,
    INF,
    KINDS,
    NAN,
    SINKS,
    assert_writes_a_part,
    case_of,
    checked,
    int32,
    no_keys,
    spoiled,
    twice,
)
from tests.gpu.op_checks import among_nan, assert_same_bits

CASE = case_of("flash_mla_sparse_fwd")
PLAIN = {"counted": False, "sink": False, "invalid": 0.0}
EVERY_HEAD_TILE = [1, 8, 16, 32, 64, 80, 128]


def inputs(tokens=5, heads=128, keys=5000, top_k=512, **options):
    return CASE.arguments("cuda", tokens=tokens, heads=heads, keys=keys, top_k=top_k, **PLAIN | options)


def empty(found, rows=slice(None)):
    out, max_logits, lse = (x[rows] for x in found)
    return out.eq(0).all() and max_logits.eq(-INF).all() and lse.eq(INF).all()


SIZES = [
    *({"tokens": 33, "heads": h, "keys": 3000, "top_k": 320, "sink": True, "invalid": 0.1} for h in EVERY_HEAD_TILE),
    *({"tokens": t, "heads": h, "keys": 8192, "top_k": 2048} for t, h in ((1, 1), (1, 128), (20, 64), (131, 64))),
    *({"tokens": t, "heads": 128, "keys": 8192, "top_k": k} for t, k in ((133, 2048), (1500, 512))),
]


@pytest.mark.parametrize(("d", "dtype"), KINDS, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=lambda sizes: "-".join(map(str, sizes.values())))
def test_heads_and_chunks_are_right(sizes, d, dtype, record_error):
    """Fewer queries than SMs, about as many, and more, with all the keys that V3.2 selects."""
    poison_free_memory(mebibytes=64)
    record_error(CASE.verify("cuda", **PLAIN | sizes, d=d, dtype=dtype))


@pytest.mark.parametrize("d", [576, 512])
@pytest.mark.parametrize("heads", [16, 64, 128])
@pytest.mark.parametrize("k", [1, 2, 63, 64, 65, 128, 192, 512, 1000, 2047, 2048])
def test_lists_of_any_length_are_right(k, heads, d, record_error):
    checked(CASE, inputs(7, heads, 5000, k, d=d), record_error)


@pytest.mark.parametrize(("tokens", "keys", "heads"), [*product((0, 1, 3, 257), (1, 63, 5000), (16, 128))])
def test_queries_and_keys_of_any_number_are_right(tokens, keys, heads, record_error):
    out, *_ = checked(CASE, inputs(tokens, heads, keys, 200), record_error)
    assert out.shape == (tokens, heads, D_V)


@pytest.mark.parametrize(
    ("heads", "tokens", "keys", "k"),
    [(128, 3, 100, 0), (16, 1, 100, 0), (128, 0, 100, 64), (0, 3, 100, 64), (0, 0, 100, 0), (64, 5, 0, 64)],
)
@pytest.mark.parametrize("d", [576, 512])
def test_without_keys_results_are_zero(d, heads, tokens, keys, k):
    for invalid in (0.0, 1.0):
        poison_free_memory(mebibytes=64)
        found = CASE.run(inputs(tokens, heads, keys, k, d=d, invalid=invalid, sink=True))
        assert found[0].shape == (tokens, heads, D_V) and empty(found)


@pytest.mark.parametrize(("d", "dtype"), KINDS, ids=str)
@pytest.mark.parametrize("heads", [1, 8, 16, 32, 64, 128])
@pytest.mark.parametrize("tokens", [1, 200])
def test_a_part_of_a_tensor_is_written(tokens, heads, d, dtype):
    given = inputs(tokens, heads, 3000, 320, d=d, dtype=dtype, sink=True)
    whole = assert_writes_a_part(CASE, given)
    out = whole[:, 1 : 1 + heads]
    CASE.run(given | {"kv": given["kv"][:0], "out": out})
    assert not out.any() and whole.isnan().sum() == whole.numel() - out.numel()


LENGTHS = [0, 1, 2, 63, 64, 65, 128, 500, 999, 1000, 1001, 2**31 - 1, -1, -(2**31)]


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("k", [64, 1000, 1024])
def test_keys_after_topk_length_are_not_looked_at(k, heads, record_error):
    """They are NaN."""
    given, lengths = inputs(len(LENGTHS), heads, 3000, k), int32(LENGTHS)
    place, near = torch.arange(k, device="cuda"), given["indices"] % 2000
    listed = torch.where(place < lengths[:, None, None], near, (2000 + place % 1000).int())
    given["kv"][2000:] = NAN
    checked(CASE, given | {"indices": listed, "topk_length": lengths}, record_error)
    given |= {"kv": given["kv"][:2000], "indices": near}
    for same in (0, k, -5, 2**31 - 1):
        checked(CASE, given | {"topk_length": torch.full_like(lengths, same)})
    checked(CASE, given | {"indices": spoiled(near, 2000, 0.3), "topk_length": lengths.flip(0)})


def test_sinks_scale_the_output_alone(record_error):
    given = inputs(50, 8)
    given["indices"][3] = given["indices"][4, 0, 1:] = -1
    out, *statistics = checked(CASE, given | {"attn_sink": torch.tensor(SINKS, device="cuda")}, record_error)
    plain = CASE.run(given)
    assert_same_bits(statistics, plain[1:])
    assert torch.equal(out[:, 0], plain[0][:, 0]) and not out[:, [1, 7]].any() and out[:3, 3].any()


@pytest.mark.parametrize("d", [576, 512])
@pytest.mark.parametrize("heads", [8, 128])
@pytest.mark.parametrize("invalid", [0.05, 0.5, 0.98, 1.0])
def test_indices_that_are_no_keys_are_ignored(invalid, heads, d, record_error):
    given = inputs(41, heads, 1999, 1000, d=d, invalid=invalid)
    given["indices"][5], given["indices"][6] = -1, 1999
    assert empty(checked(CASE, given, record_error), slice(5, 7))


@pytest.mark.parametrize("heads", [16, 128])
def test_tiles_without_keys_are_ignored(heads, record_error):
    """Keys in the last place only, in the first, in one tile of many, in every other tile."""
    given, place = inputs(8, heads, 4000, 640), torch.arange(640, device="cuda")
    tile = place // 64
    kept = [place == 639, place == 0, place == 320, tile == 9, tile == 0, tile == 5, tile % 2 == 0, tile % 2 == 1]
    listed = torch.where(torch.stack(kept)[:, None], given["indices"], no_keys(4000)[place % 6])
    checked(CASE, given | {"indices": listed}, record_error)


def test_a_key_named_twice_counts_twice(record_error):
    given = inputs(9, 64, 500, 256)
    checked(CASE, given | {"indices": given["indices"] // 100}, record_error)
    given["indices"][0] = 7
    _, max_logits, lse = checked(CASE, given)
    assert_close("lse", lse[0], max_logits[0].double() + math.log(256), **PREFILL[1])


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("heads", [16, 128])
def test_keys_that_no_query_selects_change_no_bit(bad, heads):
    """Half of the keys, and those after what topk_length counts."""
    given = inputs(30, heads, 2000, 500)
    listed = spoiled(given["indices"] // 2 * 2, 2000, 0.2)
    given |= {"indices": listed, "topk_length": torch.randint(0, 500, (30,), dtype=torch.int32, device="cuda")}
    clean = checked(CASE, given)
    given["kv"][1::2] = bad
    counted = torch.arange(500, device="cuda") < given["topk_length"][:, None, None]
    assert_same_bits(CASE.run(given | {"indices": torch.where(counted, listed, 1999)}), clean)


@pytest.mark.parametrize("tokens", [6, 300])
@pytest.mark.parametrize("heads", [16, 128])
def test_nan_reaches_the_queries_that_select_it_alone(heads, tokens):
    given = inputs(tokens, heads, 2000, 300)
    given["indices"] %= 1999
    clean = CASE.run(given)
    given["indices"][2, 0, 123], given["kv"][1999, 0, 7] = 1999, NAN
    found, others = CASE.run(given), torch.arange(tokens, device="cuda") != 2
    assert found[0][2].isnan().all() and found[2][2].isnan().all()
    assert_same_bits([x[others] for x in found], [x[others] for x in clean])


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize(("scale", "largest"), [(1e-7, -INF), (0.01, -INF), (0.3, -INF), (10.0, 50), (2400.0, 1e4)])
def test_logits_of_any_size_do_not_overflow(scale, largest, heads, record_error):
    """With large logits a softmax of few keys, and powers that would overflow if they were not relative."""
    _, max_logits, lse = checked(CASE, inputs(20, heads, 3000, 1000, scale=scale), record_error)
    assert lse.min() > largest and max_logits.min() > largest


def test_a_maximum_that_rises_from_tile_to_tile(record_error):
    """By less and by more than O is rescaled for, differently in every head, and falls in half of them. The rope
    channels do it, which are no part of the values."""
    given = inputs(6, 64, 6 * 1024, 1024)
    given["indices"] = torch.arange(6 * 1024, dtype=torch.int32, device="cuda").view(6, 1, 1024)
    step = torch.tensor([0.5, 3.0, 6.0, 20.0, 100.0, 0.0], device="cuda")[:, None]
    direction = torch.randn(6, 1, 64, device="cuda").sign()
    given["q"][..., D_V:] = (direction * torch.linspace(-1, 1, 64, device="cuda")[:, None]).bfloat16()
    lift = direction * (torch.arange(1024, device="cuda") // 64 * step)[..., None] * 576**0.5 / 64
    given["kv"][:, 0, D_V:] = lift.view(-1, 64).bfloat16()
    _, max_logits, _ = checked(CASE, given, record_error)
    assert max_logits[3, -1] > 290 and max_logits[3, 0] < 1


@pytest.mark.parametrize(("d", "dtype"), KINDS, ids=str)
@pytest.mark.parametrize("heads", [16, 64, 128])
def test_one_key_gives_its_value_exactly(heads, d, dtype):
    for k, place in ((1, 0), (64, 63), (200, 131), (700, 699)):
        given = inputs(40, heads, 700, k, d=d, dtype=dtype, invalid=1.0)
        key = torch.randint(0, 700, (40,), device="cuda")
        given["indices"][:, 0, place] = key.int()
        out, *_ = checked(CASE, given)
        assert torch.equal(out, given["kv"][key, :, :D_V].expand(-1, heads, -1))


@pytest.mark.parametrize("d", [576, 512])
def test_strides_change_no_bit(d):
    """q, kv and indices as parts of larger tensors, which hold NaN and other keys around them."""
    given = inputs(20, 32, 600, 333, d=d, sink=True, counted=True)
    expected, (q, kv, indices) = checked(CASE, given), (given[name] for name in ("q", "kv", "indices"))
    small = {name: twice(given[name], given[name] + 1) for name in ("attn_sink", "topk_length")}
    wide = torch.nn.functional.pad(indices, (1, 2), value=5)[..., 1:334]
    for change in (
        {"q": among_nan(q), "kv": among_nan(kv), "indices": wide, **small},
        {"q": q.transpose(0, 1).contiguous().transpose(0, 1), "kv": twice(kv)},
        {"q": twice(q), "indices": twice(indices, indices + 9)},
    ):
        assert_same_bits(CASE.run(given | change), expected)
    same = {"q": q[:1].expand_as(q), "indices": indices[:1].expand_as(indices)}
    expected = checked(CASE, given | {name: x.contiguous() for name, x in same.items()})
    assert_same_bits(CASE.run(given | same), expected)


@pytest.mark.parametrize("heads", [16, 128])
def test_keys_beyond_2_to_the_31_numbers(heads):
    """The last keys of 4 million, and some of the others, against the same keys in a small tensor."""
    keys = 4_000_000
    kv = torch.empty(keys, 1, 576, dtype=torch.bfloat16, device="cuda")
    assert kv.numel() > 2**31
    rows = torch.randint(0, keys, (3000,), device="cuda")
    rows = torch.cat((rows, torch.arange(keys - 1000, keys, device="cuda"))).unique()
    given = inputs(50, heads, len(rows), 700)
    given["indices"][0, 0] = len(rows) - 1 - torch.arange(700, device="cuda")
    kv[rows] = given["kv"]
    expected = checked(CASE, given)
    assert_same_bits(CASE.run(given | {"kv": kv, "indices": rows[given["indices"].long()].int()}), expected)


@pytest.mark.parametrize("heads", [16, 128])
def test_queries_do_not_depend_on_each_other(heads):
    """In another order, few of them, and alone: the same bits."""
    given = inputs(300, heads, 3000, 700)
    whole = CASE.run(given)
    for rows in (torch.randperm(300), torch.arange(7), torch.tensor([299])):
        part = CASE.run(given | {name: given[name][rows.cuda()] for name in ("q", "indices")})
        assert_same_bits(part, [x[rows.cuda()] for x in whole])


def test_fp32_runs_the_reference_and_says_so():
    given = inputs(3, 8, 100, 64, dtype=torch.float32)
    dsa.runtime.backends._warned.discard("flash_mla_sparse_fwd in float32")
    with pytest.warns(UserWarning, match="in float32 has no Hopper kernel"):
        got = CASE.run(given)
    CASE.check(given, got)
