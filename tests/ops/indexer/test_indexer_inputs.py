"""The bridge of the indexer's inputs, on the CPU: dispatch, torch.compile, and errors that name the argument."""

import contextlib

import pytest
import torch

import dsa
from dsa.ops.indexer import indexer_inputs as op
from dsa.reference.indexer import indexer_inputs as reference

OPTIONS = [{}, {"interleaved": True, "dims": "last", "use_ue8m0": False}]
QUERIES, KEYS = torch.ops.dsa.quantize_indexer_queries, torch.ops.dsa.write_indexer_keys


def query_arguments(tokens=5, heads=3, rotated=64):
    angles = torch.randn(tokens, rotated // 2)
    return torch.randn(tokens, heads, 128).bfloat16(), torch.randn(tokens, heads), angles.cos(), angles.sin()


def key_arguments(tokens=5, pages=3, page_size=4, rotated=64):
    """All arguments, the cache being the last but one, of NaN."""
    angles = torch.randn(tokens, rotated // 2)
    cache = torch.full((pages, page_size, 1, 132), 0xFF, dtype=torch.uint8)
    slots = torch.randperm(pages * page_size)[:tokens]
    slots[:1] = -1
    k = torch.randn(tokens, 128).bfloat16()
    return k, torch.rand(128), torch.randn(128), angles.cos(), angles.sin(), cache, slots


def to_meta(arguments):
    return [x.to("meta") if isinstance(x, torch.Tensor) else x for x in arguments]


def layout(x):
    return x.shape, x.stride(), x.dtype


def assert_same(got, expected):
    for x, y in zip(got, expected, strict=True):
        assert layout(x) == layout(y) and torch.equal(x.view(torch.uint8), y.view(torch.uint8))


@pytest.mark.parametrize("options", OPTIONS)
def test_queries_run_the_reference_without_a_gpu(options):
    arguments = query_arguments()
    expected = reference.quantize_indexer_queries(*arguments, **options)
    assert_same(dsa.quantize_indexer_queries(*arguments, **options), expected)


@pytest.mark.parametrize("options", [*OPTIONS, {"eps": 0.5}])
def test_keys_run_the_reference_without_a_gpu(options):
    *arguments, cache, slots = key_arguments()
    expected = cache.clone()
    reference.write_indexer_keys(*arguments, expected, slots, **options)
    assert dsa.write_indexer_keys(*arguments, cache, slots, **options) is None
    assert torch.equal(cache, expected) and not cache.eq(0xFF).all()


@pytest.mark.parametrize("options", OPTIONS)
def test_queries_are_one_node_of_a_compiled_graph(options):
    arguments = query_arguments()
    compiled = torch.compile(
        lambda *a: dsa.quantize_indexer_queries(*a, **options), fullgraph=True, backend="aot_eager"
    )
    assert_same(compiled(*arguments), dsa.quantize_indexer_queries(*arguments, **options))


@pytest.mark.parametrize("options", [{}, {"eps": 0.5, **OPTIONS[1]}])
def test_a_compiled_graph_reads_the_keys_it_wrote(options):
    *arguments, cache, slots = key_arguments()

    def write(*a):
        before = a[-2].clone()
        dsa.write_indexer_keys(*a, **options)
        return before, a[-2].clone()

    expected = cache.clone()
    dsa.write_indexer_keys(*arguments, expected, slots, **options)
    poison = cache.clone()
    before, after = torch.compile(write, fullgraph=True, backend="aot_eager")(*arguments, cache, slots)
    assert torch.equal(before, poison) and torch.equal(after, expected) and torch.equal(cache, expected)


def test_registration():
    torch.library.opcheck(QUERIES.default, (*query_arguments(), True, "last", False))
    torch.library.opcheck(KEYS.default, (*key_arguments(), 1e-6, False, "first", True))


@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_fake_results_are_laid_out_as_the_real_ones(tokens):
    arguments = query_arguments(tokens)
    arguments = (arguments[0].transpose(0, 1).contiguous().transpose(0, 1), *arguments[1:])
    fake = QUERIES(*to_meta(arguments), False, "first", True)
    assert all(x.is_meta for x in fake)
    assert [layout(x) for x in fake] == [layout(x) for x in dsa.quantize_indexer_queries(*arguments)]


def test_weights_are_contiguous_whatever_they_were():
    q, weights, cos, sin = query_arguments()
    assert dsa.quantize_indexer_queries(q, weights.T.contiguous().T, cos, sin)[1].is_contiguous()


def test_fake_calls_check_their_arguments():
    q, weights, cos, sin = to_meta(query_arguments())
    with pytest.raises(ValueError, match=r"weights: shape must be \[5, 3\], got \[5, 2\]"):
        QUERIES(q, weights[:, :2], cos, sin, False, "first", True)
    arguments = to_meta(key_arguments())
    with pytest.raises(ValueError, match="dims: must be 'first' or 'last', got 'all'"):
        KEYS(*arguments, 1e-6, False, "all", True)
    assert KEYS(*arguments, 1e-6, False, "first", True) is None


def test_forcing_the_kernels_on_the_cpu_is_an_error():
    with dsa.use_backend("cute"):
        with pytest.raises(ValueError, match="quantize_indexer_queries: backend 'cute' was asked for, but"):
            dsa.quantize_indexer_queries(*query_arguments())
        with pytest.raises(ValueError, match="write_indexer_keys: backend 'cute' was asked for, but"):
            dsa.write_indexer_keys(*key_arguments())


@pytest.mark.parametrize("name", ["q", "cache"])
def test_what_is_no_tensor_is_named(name):
    with pytest.raises(TypeError, match=f"{name}: must be a torch.Tensor, got list"):
        if name == "q":
            dsa.quantize_indexer_queries([1.0], *query_arguments()[1:])
        else:
            *arguments, _, slots = key_arguments()
            dsa.write_indexer_keys(*arguments, [1.0], slots)


def test_what_the_query_kernel_gets(launches):
    q, weights, cos, sin = query_arguments(heads=1, rotated=32)
    column = torch.randn(5, 7)[:, 3:4]
    q8, w8 = dsa.quantize_indexer_queries(q, column, cos, sin, interleaved=True, use_ue8m0=False)
    [(variant, arguments)] = launches
    assert variant == (torch.bfloat16, 32, True, False, False)
    assert torch.equal(arguments[1], column) and arguments[1].stride() == (7, 1)
    assert [x.data_ptr() for x in arguments] == [x.data_ptr() for x in (q, column, cos, sin, q8, w8)]
    assert q8.shape == q.shape and w8.shape == weights.shape
    dsa.quantize_indexer_queries(*query_arguments(tokens=0))
    dsa.quantize_indexer_queries(*query_arguments(heads=0))
    assert len(launches) == 1


def test_what_the_key_kernel_gets(launches):
    k, weight, bias, cos, sin, cache, slots = key_arguments(rotated=128)
    dsa.write_indexer_keys(k, weight, bias, cos, sin, cache, slots.int(), eps=0.25, dims="last")
    [(variant, arguments)] = launches
    assert variant == (torch.bfloat16, torch.int32, 128, False, True, True)
    assert [x.data_ptr() for x in arguments[:6]] == [x.data_ptr() for x in (k, weight, bias, cos, sin, cache)]
    assert layout(arguments[5]) == ((3, 528), (528, 1), torch.uint8) and torch.equal(arguments[6], slots.int())
    assert arguments[7:] == (4, 0.25)
    dsa.write_indexer_keys(*key_arguments(tokens=0))
    dsa.write_indexer_keys(k[:0], weight, bias, cos[:0], sin[:0], cache[:0], slots[:0])
    assert len(launches) == 1


def test_what_the_kernels_do_not_take(launches):
    q, weights, cos, sin = query_arguments()
    cases = [
        ((torch.randn(5, 3, 132)[..., :128], weights, cos, sin), None),
        ((torch.randn(5, 3, 131)[..., :128], weights, cos, sin), "q: rows must start at multiples of 16 bytes"),
        ((torch.randn(5, 3, 256)[..., ::2], weights, cos, sin), "q: the last dimension must be contiguous"),
        ((q, torch.randn(3, 5).T, cos, sin), r"weights: the last dimension must be contiguous, got strides \[1, 5\]"),
        ((q, weights.to("meta"), cos, sin), "weights: must be on q's device cpu, got meta"),
        ((q, weights[:, :2], cos, sin), r"weights: shape must be \[5, 3\], got \[5, 2\]"),
    ]
    for arguments, message in cases:
        with pytest.raises(ValueError, match=message) if message else contextlib.nullcontext():
            dsa.quantize_indexer_queries(*arguments)
    names = ("k", "norm_weight", "norm_bias", "cos", "sin", "cache", "slots")
    good = dict(zip(names, key_arguments()))
    for name, value, message in [
        ("k", torch.randn(5, 129)[:, :128], "k: rows must start at multiples of 16 bytes"),
        ("norm_weight", torch.rand(129)[1:], "norm_weight: rows must start at multiples of 16 bytes"),
        ("norm_bias", torch.rand(256)[::2], "norm_bias: the last dimension must be contiguous"),
        ("sin", good["sin"].to("meta"), "sin: must be on cache's device cpu, got meta"),
        ("slots", torch.arange(10)[::2], r"slots: must be contiguous, got strides \[2\]"),
        ("cache", good["cache"].new_zeros(3, 530)[:, :528].unflatten(1, (4, 1, 132)), "cache: pages must start at"),
        ("cache", good["cache"].repeat(1, 1, 1, 2)[..., :132], "cache: every page must be contiguous"),
    ]:
        with pytest.raises(ValueError, match=message):
            dsa.write_indexer_keys(**{**good, name: value})
    assert len(launches) == 1


@pytest.mark.parametrize("rotated", [0, 16, 96, 126])
def test_the_kernels_rotate_some_numbers_of_channels(rotated, launches):
    message = rf"cos: the kernel rotates R \(32, 64, 128\) channels, got {rotated}"
    with pytest.raises(ValueError, match=message):
        dsa.quantize_indexer_queries(*query_arguments(rotated=rotated))
    with pytest.raises(ValueError, match=message):
        dsa.write_indexer_keys(*key_arguments(rotated=rotated))
    assert not launches


def test_angles_in_rows_of_16_bytes():
    wide = torch.randn(9, 35)
    aligned, cos = torch.randn(9, 48)[:, :16], torch.randn(9, 16)
    assert op._angle_rows(aligned) is aligned and op._angle_rows(cos) is cos
    # rows, address, last dimension
    for bad in (wide[:, :32], torch.randn(9, 36)[:, 1:33], torch.randn(9, 64)[:, ::2], torch.randn(32, 9).T):
        got = op._angle_rows(bad)
        assert torch.equal(got, bad) and got.is_contiguous() and got.data_ptr() % 16 == 0


def test_strides_of_single_rows():
    q = torch.randn(4, 3, 128)
    assert op._without_odd_strides(q) is q
    one = q.as_strided((1, 3, 128), (5, 128, 1), 128)
    got = op._without_odd_strides(one)
    assert got.stride() == (128, 128, 1) and torch.equal(got, one) and got.data_ptr() == one.data_ptr()
    assert op._without_odd_strides(q[:, 1:2].as_strided((4, 1, 128), (384, 7, 1))).stride() == (384, 128, 1)
    assert op._without_odd_strides(q[0, :1].as_strided((1, 128), (3, 1))).stride() == (128, 1)
