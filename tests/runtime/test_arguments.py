"""Specs of arguments: what they accept; every message says which argument, what it got and what is accepted."""

import pytest
import torch

from dsa.runtime.arguments import (
    ALIGNED,
    CONTIGUOUS,
    F32,
    INNER,
    PAGES,
    ROWS,
    Arguments,
    Choice,
    Dtype,
    Flag,
    Int,
    Number,
    Tensor,
    Tensors,
    check_layout,
    check_mergeable,
)
from dsa.runtime.checks import FLOATS
from tests.reference.common import assert_refused

LINEAR = Arguments(
    x=Tensor("... K", FLOATS),
    weight=Tensor("N K", FLOATS, like="x"),
    scale=Tensor("ceil(N/128) ceil(K/128)", F32),
    bias=Tensor("N", F32, optional=True),
    out=Tensor("... N", FLOATS, like="x", optional=True, written=True),
)


CALL = {
    "x": torch.zeros(2, 3, 130),
    "weight": torch.zeros(5, 130),
    "scale": torch.zeros(1, 2),
    "bias": torch.zeros(5),
    "out": torch.zeros(2, 3, 5),
}


def linear(**changes):
    return (CALL | changes).values()


def test_sizes_are_found_by_name():
    sizes = LINEAR.check(*linear())
    assert (sizes["K"], sizes["N"], sizes["..."]) == (130, 5, (2, 3))
    assert LINEAR.check(*linear(bias=None, out=None)) == sizes
    assert LINEAR.check(*linear(x=torch.zeros(130), out=torch.zeros(5)))["..."] == ()


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"x": 1.0}, TypeError, r"x: must be a torch\.Tensor, got float"),
        ({"x": torch.zeros(())}, ValueError, r"x: must have at least 1 dimension, got shape \[\]"),
        ({"x": torch.zeros(3, 130).int()}, ValueError, "x: dtype must be float32, bfloat16 or float16, got int32"),
        ({"weight": None}, TypeError, r"weight: must be a torch\.Tensor, got NoneType"),
        ({"weight": torch.zeros(5, 7)}, ValueError, r"weight: shape must be \[N, 130\], got \[5, 7\] .*as of x\)"),
        ({"weight": torch.zeros(5, 130).half()}, ValueError, "weight: dtype must be x's float32, got float16"),
        (
            {"scale": torch.zeros(1, 1)},
            ValueError,
            r"scale: shape must be \[1, 2\], got \[1, 1\] \(sizes as of weight and x\)",
        ),
        ({"bias": torch.zeros(6)}, ValueError, r"bias: shape must be \[5\], got \[6\] \(sizes as of weight\)"),
        (
            {"out": torch.zeros(3, 2, 5)},
            ValueError,
            r"out: shape must be \[2, 3, 5\], got \[3, 2, 5\] \(sizes as of weight and x\)",
        ),
        ({"out": torch.zeros(1, 1, 5).expand(2, 3, 5)}, ValueError, "out: its numbers must not share memory"),
        ({"bias": torch.zeros(5, device="meta")}, ValueError, "bias: must be on x's device cpu, got meta"),
        ({"scale": torch.zeros(1, 2).to_sparse()}, ValueError, "scale: must be a dense tensor, got layout sparse_coo"),
    ],
)
def test_a_wrong_tensor_is_named(changes, error, message):
    with pytest.raises(error, match=message):
        LINEAR.check(*linear(**changes))


def test_a_size_plus_a_number_binds_the_size():
    bounds = Arguments(cu_seqlens=Tensor("B+1", (torch.int32,)), starts=Tensor("B", (torch.int32,)))
    ints = [torch.zeros(n, dtype=torch.int32) for n in range(4)]
    assert bounds.check(ints[3], ints[2])["B"] == 2
    assert_refused(r"starts: shape must be \[2\], got \[3\] \(sizes as of cu_seqlens\)", bounds.check, ints[3], ints[3])
    assert_refused(r"cu_seqlens: must have B \+ 1 entries, got shape \[0\]", bounds.check, ints[0], ints[0])


def test_a_word_that_cannot_be_solved_is_the_same_size_everywhere():
    angles = Arguments(x=Tensor("T ... D", FLOATS), cos=Tensor("T R/2", F32), sin=Tensor("T R/2", F32))
    angles.check(torch.zeros(4, 3, 2, 16), torch.zeros(4, 8), torch.zeros(4, 8))
    with pytest.raises(ValueError, match=r"cos: shape must be \[4, R / 2\], got \[3, 8\] \(sizes as of x\)"):
        angles.check(torch.zeros(4, 16), torch.zeros(3, 8), torch.zeros(4, 8))
    with pytest.raises(ValueError, match=r"sin: shape must be \[4, 8\], got \[4, 4\] \(sizes as of x and cos\)"):
        angles.check(torch.zeros(4, 16), torch.zeros(4, 8), torch.zeros(4, 4))


SCALARS = Arguments(
    x=Tensor("T", F32),
    count=Int(most=8),
    eps=Number(least=0),
    flag=Flag(),
    kind=Choice(("first", "last")),
    dtype=Dtype(FLOATS),
    limit=Number(optional=True),
)


@pytest.mark.parametrize(
    ("place", "value", "error", "message"),
    [
        (1, 0, ValueError, "count: must be at least 1, got 0"),
        (1, 9, ValueError, "count: must be at most 8, got 9"),
        (1, True, TypeError, "count: must be an int, got bool"),
        (2, -1.0, ValueError, r"eps: must be at least 0, got -1\.0"),
        (2, float("nan"), ValueError, "eps: must be finite in fp32, got nan"),
        (3, 1, TypeError, "flag: must be True or False, got int"),
        (4, "middle", ValueError, "kind: must be 'first' or 'last', got 'middle'"),
        (5, torch.int8, ValueError, "dtype: must be float32, bfloat16 or float16, got int8"),
        (6, "none", TypeError, "limit: must be a number, got str"),
    ],
)
def test_a_wrong_scalar_is_named(place, value, error, message):
    values = [torch.zeros(2), 4, 1e-6, True, "first", torch.float32, None]
    SCALARS.check(*values)
    values[place] = value
    with pytest.raises(error, match=message):
        SCALARS.check(*values)


def test_a_rule_sees_the_arguments_that_it_names():
    seen = []
    few = Arguments(rule=lambda k, *, x: seen.append((k, x)), x=Tensor("T", F32), y=Tensor("T", F32), k=Int())
    x = torch.zeros(3)
    few.check(x, torch.ones(3), 2)
    assert len(seen) == 1 and seen[0][0] == 2 and seen[0][1] is x
    for rule, got in ((lambda x, n: None, "n"), (lambda x, *y: None, r"\*y"), (lambda **k: None, r"\*\*k")):
        with pytest.raises(TypeError, match=f"rule: must take arguments by their names, x, k, got {got}"):
            Arguments(rule=rule, x=Tensor("T", F32), k=Int())


def test_a_rule_is_called_after_the_specs_checks():
    def rule(x, k):
        if k > len(x):
            raise ValueError(f"k: must be at most {len(x)}, got {k}")

    few = Arguments(rule=rule, x=Tensor("T", F32), k=Int())
    few.check(torch.zeros(3), 3)
    assert_refused("k: must be at most 3, got 4", few.check, torch.zeros(3), 4)
    assert_refused("k: must be at least 1", few.check, torch.zeros(3), 0)


def test_either_of_two_shapes():
    lengths = Arguments(q=Tensor("B T D", F32), lengths=Tensor("B | B T", (torch.int32,)), more=Tensor("T", F32))
    q, more = torch.zeros(2, 3, 4), torch.zeros(3)
    for shape in ((2,), (2, 3)):
        lengths.check(q, torch.zeros(shape, dtype=torch.int32), more)
    for value, message in [
        (1, r"lengths: must be a torch\.Tensor, got int"),
        (torch.zeros(2), "lengths: dtype must be int32, got float32"),
        (torch.zeros(3).int(), r"lengths: shape must be \[2\] or \[2, 3\], got \[3\] \(sizes as of q\)"),
        (torch.zeros(2, 2).int(), r"lengths: shape must be \[2\] or \[2, 3\], got \[2, 2\]"),
        (torch.zeros(2, 3, 1).int(), r"lengths: shape must be \[2\] or \[2, 3\], got \[2, 3, 1\]"),
    ]:
        assert_refused(message, lengths.check, q, value, more)
    alone = Arguments(lengths=Tensor("B | B T", (torch.int32,)))
    assert alone.check(torch.zeros(2, 5, dtype=torch.int32)) == {"B": 2, "T": 5}
    with pytest.raises(ValueError, match=r"lengths: shape must be \[B\] or \[B, T\], got \[\]$"):
        alone.check(torch.zeros((), dtype=torch.int32))


def test_a_tensors_own_rule_says_more_of_it():
    def row(name, cache):
        if cache.shape[1] not in (12, 20):
            raise ValueError(f"{name}: rows must have 12 or 20 bytes, got {cache.shape[1]}")
        return {"d": cache.shape[1] - 4}

    write = Arguments(
        first=("cache",),
        x=Tensor("T d", F32),
        cache=Tensor("slots d", (torch.uint8,), name="caches[0]", rule=row),
    )
    assert write.check(torch.zeros(3, 8), torch.zeros(5, 12).byte()) == {"slots": 5, "d": 8, "T": 3}
    with pytest.raises(ValueError, match=r"x: shape must be \[T, 16\], got \[3, 8\] \(sizes as of caches\[0\]\)"):
        write.check(torch.zeros(3, 8), torch.zeros(5, 20).byte())
    with pytest.raises(ValueError, match=r"caches\[0\]: rows must have 12 or 20 bytes, got 8"):
        write.check(torch.zeros(3, 8), torch.zeros(5, 8).byte())
    assert_refused(r"caches\[0\]: dtype must be uint8, got float32", write.check, torch.zeros(3, 8), torch.zeros(5, 8))


def test_what_comes_first_gives_sizes_and_device():
    product = Arguments(first=("weight",), x=Tensor("... K", F32), weight=Tensor("N K", F32), flag=Flag())
    with pytest.raises(ValueError, match=r"x: shape must be \[2, 4\], got \[2, 3\] \(sizes as of weight\)"):
        product.check(torch.zeros(2, 3), torch.zeros(5, 4), True)
    with pytest.raises(ValueError, match="x: must be on weight's device cpu, got meta"):
        product.check(torch.zeros(2, 4, device="meta"), torch.zeros(5, 4), True)
    assert_refused("flag: must be True or False, got int", product.check, torch.zeros(2, 4), torch.zeros(5, 4), 1)


def test_another_name_is_shown():
    pair = Arguments(q=Tensor("T D", F32), k=Tensor("T D", F32, name="kv[0]"))
    with pytest.raises(ValueError, match=r"kv\[0\]: shape must be \[2, 4\], got \[3, 4\] \(sizes as of q\)"):
        pair.check(torch.zeros(2, 4), torch.zeros(3, 4))
    with pytest.raises(ValueError, match=r"kv\[0\]: must be on q's device cpu, got meta"):
        pair.check(torch.zeros(2, 4), torch.zeros(2, 4, device="meta"))
    pair = Arguments(k=Tensor("T D", FLOATS, name="kv[0]"), v=Tensor("T D", FLOATS, like="k", name="kv[1]"))
    with pytest.raises(ValueError, match=r"kv\[1\]: must be on kv\[0\]'s device cpu, got meta"):
        pair.check(torch.zeros(2, 4), torch.zeros(2, 4, device="meta"))
    with pytest.raises(ValueError, match=r"kv\[1\]: dtype must be kv\[0\]'s float32, got float16"):
        pair.check(torch.zeros(2, 4), torch.zeros(2, 4).half())


def shifted(x, elements):
    """A copy of x that starts `elements` past a multiple of 16 bytes."""
    buffer = torch.zeros(x.numel() + elements, dtype=x.dtype)
    buffer[elements:] = x.flatten()
    return buffer[elements:].view(x.shape)


WIDE = torch.zeros(4, 40)


@pytest.mark.parametrize(
    ("layout", "x", "message"),
    [
        (INNER, WIDE[:, ::2], r"x: the last dimension must be contiguous, got strides \[40, 2\]"),
        (ROWS, WIDE[:, ::2], "x: the last dimension must be contiguous"),
        (ROWS, WIDE[:, 1:9], r"x: rows must start at multiples of 16 bytes, got an address 4 bytes past one"),
        (ROWS, torch.zeros(4, 9)[:, :8], r"x: rows must .* strides of \[36\] bytes"),
        (CONTIGUOUS, WIDE[:, :8], r"x: must be contiguous, got strides \[40, 1\]"),
        (ALIGNED, WIDE[:, :8], "x: must be contiguous"),
        (PAGES, WIDE.view(2, 2, 40)[..., :36], r"x: every page must be contiguous, got strides \[80, 40, 1\]"),
        (PAGES, torch.zeros(2, 6), r"x: pages .* an address 0 bytes past one and a page stride of 24 bytes"),
        (PAGES, WIDE.flatten()[1:5].view(1, 4), "x: pages .* an address 4 bytes past one and a page stride of 0 bytes"),
        (ROWS, torch.zeros(4, 8).T, r"x: the last dimension must be contiguous, got strides \[1, 8\]"),
        (ROWS, torch.zeros(1).expand(4), r"x: the last dimension must be contiguous, got strides \[0\]"),
        (ROWS, shifted(torch.zeros(4, 8), 3), r"x: rows .* an address 12 bytes past one and strides of \[32\] bytes"),
        (
            ROWS,
            shifted(torch.zeros(8).bfloat16(), 1),
            r"x: rows .* an address 2 bytes past one and strides of \[\] bytes",
        ),
        (
            ROWS,
            torch.zeros(2, 4, 4).bfloat16(),
            r"x: rows .* an address 0 bytes past one and strides of \[32, 8\] bytes",
        ),
        (ROWS, torch.zeros(3, 1, 10), r"x: rows .* strides of \[40\] bytes"),
        (ALIGNED, WIDE.flatten()[1:], "x: must start at a multiple of 16 bytes, got an address 4 past one"),
    ],
)
def test_memory_that_a_kernel_does_not_take(layout, x, message):
    assert_refused(message, check_layout, "x", x, layout)


def test_a_layout_may_follow_from_the_tensor():
    either = Arguments(x=Tensor("T D", FLOATS, layout=lambda x: CONTIGUOUS if x.dtype == torch.float32 else INNER))
    either.check_layouts(WIDE[:, :8].bfloat16()[:, :4])
    assert_refused("x: must be contiguous", either.check_layouts, WIDE[:, :8])


def test_dimensions_that_kernels_take_as_one():
    merged = Arguments(
        x=Tensor("... D", FLOATS, layout=INNER, merged=(0, -1)),
        y=Tensor("T ... D", FLOATS, optional=True, merged=(1, -1)),
        z=Tensors("... H D", FLOATS, count="n", optional=True, merged=(0, -2)),
    )
    x = torch.zeros(2, 3, 4, 6)
    apart = x[:, :2]
    for right in (x, x[..., 1:3], x[:, :1, :1], x[:1], x[0, :2], x[0, 0, 0], x[0, :0], x[:, :, :0]):
        merged.check_layouts(right, None, None)
    with pytest.raises(ValueError, match=r"x: dimensions 0 to 2 must be mergeable .*, got shape \[2, 2, 4, 6\]"):
        merged.check_layouts(apart, None, None)
    merged.check_layouts(x, apart, [x, x[:, :, :2]])
    assert_refused(r"y: dimensions 1 to 2 .* strides \[72, 24, 6, 1\]", merged.check_layouts, x, x[:, :, :2], None)
    assert_refused(r"z\[1\]: dimensions 0 to 1 must be mergeable", merged.check_layouts, x, None, [x, apart])
    assert_refused("x: dimensions 1 to 2 must be mergeable", check_mergeable, "x", x[:, :, :2], 1, 3)


@pytest.mark.parametrize(
    ("layouts", "x"),
    [
        ((PAGES,), WIDE[:, :6]),
        ((PAGES,), torch.zeros(1, 6)),
        ((PAGES,), torch.zeros(0, 6)),
        ((PAGES,), torch.zeros(3, 5)[:1].as_strided((1, 5), (3, 1))),
        ((INNER, ROWS), WIDE[:, :8]),
        ((INNER, ROWS), WIDE[:1, :1].as_strided((1, 1), (7, 3))),  # one element: its strides mean nothing
        ((INNER, ROWS), torch.zeros(())),
        ((INNER, ROWS), torch.zeros(4, 0)),
        ((ROWS,), torch.zeros(5, 24)[:, :17]),
        ((ROWS,), torch.zeros(5, 3, 8).transpose(0, 1)),
        ((ROWS,), torch.zeros(3)),
        ((ROWS,), torch.zeros(5, 4).as_strided((5, 1), (4, 3))),
        ((ROWS,), torch.zeros(2, 7)[:1, :5]),  # a single row's stride means nothing
        ((ROWS,), torch.zeros(8).expand(5, 8)),
        ((ROWS,), shifted(torch.zeros(4, 8), 4)),
        ((CONTIGUOUS, ALIGNED), WIDE),
        ((CONTIGUOUS, ALIGNED), torch.zeros(9)[1:].view(1, 8)[:, :0]),
    ],
)
def test_memory_that_a_kernel_takes(layouts, x):
    for layout in layouts:
        check_layout("x", x, layout)


KEYS = Arguments(
    q=Tensor("T d", FLOATS),
    kv=Tensor("n d", (*FLOATS, torch.uint8), like="q", besides=(torch.uint8,)),
    d_v=Int(most="d"),
    window=Int(least=0),
    indices=Tensor("T window", (torch.int32,), optional=True),
)


PICKS = torch.zeros(3, 2, dtype=torch.int32)
KEYS_CALL = {"q": torch.zeros(3, 8).half(), "kv": torch.zeros(5, 8).half(), "d_v": 8, "window": 2, "indices": PICKS}


def keys(**changes):
    return (KEYS_CALL | changes).values()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"d_v": 9}, r"d_v: must be at most d = 8, got 9 \(sizes as of q\)"),
        ({"d_v": 0}, "d_v: must be at least 1, got 0"),
        ({"window": 3}, r"indices: shape must be \[3, 3\], got \[3, 2\] \(sizes as of q and window\)"),
        ({"kv": torch.zeros(5, 8)}, "kv: dtype must be q's float16 or uint8, got float32"),
    ],
)
def test_numbers_are_sizes_too(changes, message):
    KEYS.check(*keys())
    assert_refused(message, KEYS.check, *keys(**changes))


def test_dtypes_besides_that_of_another_argument():
    wide = torch.zeros(3, 8)
    KEYS.check(*keys(kv=torch.zeros(5, 8, dtype=torch.uint8)))
    KEYS.check(*keys(q=wide, kv=torch.zeros(5, 8)))
    with pytest.raises(ValueError, match="kv: dtype must be q's float32 or uint8, got float16"):
        KEYS.check(*keys(q=wide))


BRANCHES = Arguments(
    outs=Tensors("... H d", FLOATS, count="n", layout=ROWS),
    lses=Tensors("... H", F32, count="n"),
    sink=Tensor("H", F32, optional=True),
)


OUTS, LSES = [torch.zeros(2, 3, 4)] * 2, [torch.zeros(2, 3)] * 2


def branches(**changes):
    return ({"outs": OUTS, "lses": LSES, "sink": torch.zeros(3)} | changes).values()


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"outs": torch.zeros(2, 2, 3, 4)}, TypeError, "outs: must be a list of tensors, got Tensor"),
        ({"outs": []}, ValueError, "outs: must be a list of at least one tensor, got none"),
        ({"lses": [torch.zeros(2, 3)]}, ValueError, "lses: must be a list of as many tensors as outs, 2, got 1"),
        ({"outs": [torch.zeros(2, 3, 4), None]}, TypeError, r"outs\[1\]: must be a torch\.Tensor, got NoneType"),
        (
            {"outs": [torch.zeros(2, 3, 4), torch.zeros(1, 3, 4)]},
            ValueError,
            r"outs\[1\]: shape must be \[2, 3, 4\], got \[1, 3, 4\] \(sizes as of outs\[0\]\)",
        ),
        (
            {"outs": [torch.zeros(2, 3, 4), torch.zeros(2, 3, 4).half()]},
            ValueError,
            r"outs\[1\]: dtype must be outs\[0\]'s float32, got float16",
        ),
        (
            {"lses": [torch.zeros(2, 3), torch.zeros(2, 3, device="meta")]},
            ValueError,
            r"lses\[1\]: must be on outs\[0\]'s device cpu, got meta",
        ),
        ({"sink": torch.zeros(2)}, ValueError, r"sink: shape must be \[3\], got \[2\] \(sizes as of outs\[0\]\)"),
    ],
)
def test_a_wrong_tensor_of_a_list_is_named(changes, error, message):
    assert BRANCHES.check(*branches())["n"] == 2
    with pytest.raises(error, match=message):
        BRANCHES.check(*branches(**changes))


def test_the_memory_of_a_list_of_tensors():
    BRANCHES.check_layouts(*branches())
    with pytest.raises(ValueError, match=r"outs\[1\]: the last dimension must be contiguous"):
        BRANCHES.check_layouts(*branches(outs=[torch.zeros(2, 3, 4), torch.zeros(2, 3, 8)[..., ::2]]))
