"""Specs of arguments: what they accept, and error messages that name the argument, what it got and what is accepted."""

import pytest
import torch

from dsa.runtime.arguments import (
    F32,
    Arguments,
    Choice,
    Dtype,
    Flag,
    Int,
    Number,
    Tensor,
    Tensors,
)
from dsa.runtime.checks import ALIGNED, CONTIGUOUS, FLOATS, INNER, PAGES, ROWS, check_layout, check_mergeable
from tests.reference.common import assert_refused

INT32 = (torch.int32,)
WIDE = torch.zeros(4, 40)


def zeros(*shape):
    return torch.zeros(shape)


def ints(*shape):
    return torch.zeros(shape, dtype=torch.int32)


def meta(*shape):
    return torch.zeros(shape, device="meta")


def known_rows(name, cache):
    if cache.shape[1] not in (12, 20):
        raise ValueError(f"{name}: rows must have 12 or 20 bytes, got {cache.shape[1]}")
    return {"d": cache.shape[1] - 4}


def at_most_the_length(x, k):
    if k > len(x):
        raise ValueError(f"k: must be at most {len(x)}, got {k}")


SPECS = {
    "linear": Arguments(
        x=Tensor("... K", FLOATS),
        weight=Tensor("N K", FLOATS, like="x"),
        scale=Tensor("ceil(N/128) ceil(K/128)", F32),
        bias=Tensor("N", F32, optional=True),
        out=Tensor("... N", FLOATS, like="x", optional=True, written=True),
    ),
    "scalars": Arguments(
        x=Tensor("T", F32),
        count=Int(most=8),
        eps=Number(least=0),
        flag=Flag(),
        kind=Choice(("first", "last")),
        dtype=Dtype(FLOATS),
        limit=Number(optional=True),
    ),
    # The shape "B+1" also determines B.
    "bounds": Arguments(cu_seqlens=Tensor("B+1", INT32), starts=Tensor("B", INT32)),
    # The shape "R/2" does not determine R, but it must be the same number everywhere.
    "angles": Arguments(x=Tensor("T ... D", FLOATS), cos=Tensor("T R/2", F32), sin=Tensor("T R/2", F32)),
    "rule": Arguments(rule=at_most_the_length, x=Tensor("T", F32), k=Int()),
    "lengths": Arguments(q=Tensor("B T D", F32), lengths=Tensor("B | B T", INT32), more=Tensor("T", F32)),
    "lengths alone": Arguments(lengths=Tensor("B | B T", INT32)),
    # A tensor's rule can replace sizes. The arguments in `first` are checked before the others: they determine sizes
    # and the device.
    "cache": Arguments(
        first=("cache",),
        x=Tensor("T d", F32),
        cache=Tensor("slots d", (torch.uint8,), name="caches[0]", rule=known_rows),
    ),
    "product": Arguments(first=("weight",), x=Tensor("... K", F32), weight=Tensor("N K", F32), flag=Flag()),
    "pair": Arguments(q=Tensor("T D", F32), k=Tensor("T D", F32, name="kv[0]")),
    "pair of one dtype": Arguments(
        k=Tensor("T D", FLOATS, name="kv[0]"), v=Tensor("T D", FLOATS, like="k", name="kv[1]")
    ),
    # The value of an Int can be a dimension of a later shape (`window`), and a dimension can limit an Int (`d_v`).
    # `besides` lists dtypes that are accepted besides that of the argument named by `like`.
    "keys": Arguments(
        q=Tensor("T d", FLOATS),
        kv=Tensor("n d", (*FLOATS, torch.uint8), like="q", besides=(torch.uint8,)),
        d_v=Int(most="d"),
        window=Int(least=0),
        indices=Tensor("T window", INT32, optional=True),
    ),
    "branches": Arguments(
        outs=Tensors("... H d", FLOATS, count="n", layout=ROWS),
        lses=Tensors("... H", F32, count="n"),
        sink=Tensor("H", F32, optional=True),
    ),
}
CALLS = {
    "linear": {
        "x": zeros(2, 3, 130),
        "weight": zeros(5, 130),
        "scale": zeros(1, 2),
        "bias": zeros(5),
        "out": zeros(2, 3, 5),
    },
    "scalars": {
        "x": zeros(2),
        "count": 4,
        "eps": 1e-6,
        "flag": True,
        "kind": "first",
        "dtype": torch.float32,
        "limit": None,
    },
    "bounds": {"cu_seqlens": ints(3), "starts": ints(2)},
    "angles": {"x": zeros(4, 16), "cos": zeros(4, 8), "sin": zeros(4, 8)},
    "rule": {"x": zeros(3), "k": 3},
    "lengths": {"q": zeros(2, 3, 4), "lengths": ints(2), "more": zeros(3)},
    "lengths alone": {"lengths": ints(2, 5)},
    "cache": {"x": zeros(3, 8), "cache": zeros(5, 12).byte()},
    "product": {"x": zeros(2, 4), "weight": zeros(5, 4), "flag": True},
    "pair": {"q": zeros(2, 4), "k": zeros(2, 4)},
    "pair of one dtype": {"k": zeros(2, 4), "v": zeros(2, 4)},
    "keys": {"q": zeros(3, 8).half(), "kv": zeros(5, 8).half(), "d_v": 8, "window": 2, "indices": ints(3, 2)},
    "branches": {"outs": [zeros(2, 3, 4)] * 2, "lses": [zeros(2, 3)] * 2, "sink": zeros(3)},
}


@pytest.mark.parametrize(
    ("name", "changes", "sizes"),
    [
        ("linear", {}, {"K": 130, "N": 5, "...": (2, 3)}),
        ("linear", {"bias": None, "out": None}, {"K": 130, "N": 5, "...": (2, 3)}),
        ("linear", {"x": zeros(130), "out": zeros(5)}, {"...": ()}),
        ("scalars", {}, {"T": 2}),
        ("bounds", {}, {"B": 2}),
        ("angles", {"x": zeros(4, 3, 2, 16)}, {"T": 4, "D": 16}),
        ("rule", {}, {"T": 3}),
        ("lengths", {}, {"B": 2, "T": 3}),
        ("lengths", {"lengths": ints(2, 3)}, {"B": 2, "T": 3}),
        ("lengths alone", {}, {"B": 2, "T": 5}),
        ("cache", {}, {"slots": 5, "d": 8, "T": 3}),
        ("keys", {"kv": ints(5, 8).byte()}, {"n": 5, "d": 8}),
        ("keys", {"q": zeros(3, 8), "kv": zeros(5, 8)}, {"n": 5, "d": 8}),
        ("branches", {}, {"n": 2}),
    ],
)
def test_sizes_are_found_by_name(name, changes, sizes):
    found = SPECS[name].check(*(CALLS[name] | changes).values())
    assert {size: found[size] for size in sizes} == sizes


@pytest.mark.parametrize(
    ("name", "changes", "error", "message"),
    [
        ("linear", {"x": 1.0}, TypeError, r"x: must be a torch\.Tensor, got float"),
        ("linear", {"x": zeros()}, ValueError, r"x: must have at least 1 dimension, got shape \[\]"),
        ("linear", {"x": ints(3, 130)}, ValueError, "x: dtype must be float32, bfloat16 or float16, got int32"),
        ("linear", {"weight": None}, TypeError, r"weight: must be a torch\.Tensor, got NoneType"),
        ("linear", {"weight": zeros(5, 7)}, ValueError, r"weight: shape must be \[N, 130\], got \[5, 7\] .*as of x\)"),
        ("linear", {"weight": zeros(5, 130).half()}, ValueError, "weight: dtype must be x's float32, got float16"),
        (
            "linear",
            {"scale": zeros(1, 1)},
            ValueError,
            r"scale: shape must be \[1, 2\], got \[1, 1\] \(sizes as of wei",
        ),
        ("linear", {"bias": zeros(6)}, ValueError, r"bias: shape must be \[5\], got \[6\] \(sizes as of weight\)"),
        (
            "linear",
            {"out": zeros(3, 2, 5)},
            ValueError,
            r"out: shape must be \[2, 3, 5\], got \[3, 2, 5\] \(sizes as of weight and x\)",
        ),
        ("linear", {"out": zeros(1, 1, 5).expand(2, 3, 5)}, ValueError, "out: its numbers must not share memory"),
        ("linear", {"bias": meta(5)}, ValueError, "bias: must be on x's device cpu, got meta"),
        ("linear", {"scale": zeros(1, 2).to_sparse()}, ValueError, "scale: must be a dense tensor, got layout sparse_"),
        ("scalars", {"count": 0}, ValueError, "count: must be at least 1, got 0"),
        ("scalars", {"count": 9}, ValueError, "count: must be at most 8, got 9"),
        ("scalars", {"count": True}, TypeError, "count: must be an integer, got True"),
        ("scalars", {"eps": -1.0}, ValueError, r"eps: must be at least 0, got -1\.0"),
        ("scalars", {"eps": float("nan")}, ValueError, "eps: must be finite in fp32, got nan"),
        ("scalars", {"flag": 1}, TypeError, "flag: must be True or False, got 1"),
        ("scalars", {"kind": "middle"}, ValueError, "kind: must be 'first' or 'last', got 'middle'"),
        ("scalars", {"dtype": torch.int8}, ValueError, "dtype: must be float32, bfloat16 or float16, got int8"),
        ("scalars", {"limit": "none"}, TypeError, "limit: must be a number, got 'none'"),
        (
            "bounds",
            {"starts": ints(3)},
            ValueError,
            r"starts: shape must be \[2\], got \[3\] \(sizes as of cu_seqlens\)",
        ),
        ("bounds", {"cu_seqlens": ints(0)}, ValueError, r"cu_seqlens: must have B \+ 1 entries, got shape \[0\]"),
        (
            "angles",
            {"cos": zeros(3, 8)},
            ValueError,
            r"cos: shape must be \[4, R / 2\], got \[3, 8\] \(sizes as of x\)",
        ),
        (
            "angles",
            {"sin": zeros(4, 4)},
            ValueError,
            r"sin: shape must be \[4, 8\], got \[4, 4\] \(sizes as of x and cos",
        ),
        ("rule", {"k": 4}, ValueError, "k: must be at most 3, got 4"),
        ("rule", {"k": 0}, ValueError, "k: must be at least 1"),
        ("lengths", {"lengths": 1}, TypeError, r"lengths: must be a torch\.Tensor, got int"),
        ("lengths", {"lengths": zeros(2)}, ValueError, "lengths: dtype must be int32, got float32"),
        (
            "lengths",
            {"lengths": ints(3)},
            ValueError,
            r"lengths: shape must be \[2\] or \[2, 3\], got \[3\] \(sizes as of q\)",
        ),
        ("lengths", {"lengths": ints(2, 2)}, ValueError, r"lengths: shape must be \[2\] or \[2, 3\], got \[2, 2\]"),
        (
            "lengths",
            {"lengths": ints(2, 3, 1)},
            ValueError,
            r"lengths: shape must be \[2\] or \[2, 3\], got \[2, 3, 1\]",
        ),
        ("lengths alone", {"lengths": ints()}, ValueError, r"lengths: shape must be \[B\] or \[B, T\], got \[\]$"),
        (
            "cache",
            {"cache": zeros(5, 20).byte()},
            ValueError,
            r"x: shape must be \[T, 16\], got \[3, 8\] \(sizes as of caches\[0\]\)",
        ),
        ("cache", {"cache": zeros(5, 8).byte()}, ValueError, r"caches\[0\]: rows must have 12 or 20 bytes, got 8"),
        ("cache", {"cache": zeros(5, 8)}, ValueError, r"caches\[0\]: dtype must be uint8, got float32"),
        ("product", {"x": zeros(2, 3)}, ValueError, r"x: shape must be \[2, 4\], got \[2, 3\] \(sizes as of weight\)"),
        ("product", {"x": meta(2, 4)}, ValueError, "x: must be on weight's device cpu, got meta"),
        ("product", {"flag": 1}, TypeError, "flag: must be True or False, got 1"),
        ("pair", {"k": zeros(3, 4)}, ValueError, r"kv\[0\]: shape must be \[2, 4\], got \[3, 4\] \(sizes as of q\)"),
        ("pair", {"k": meta(2, 4)}, ValueError, r"kv\[0\]: must be on q's device cpu, got meta"),
        ("pair of one dtype", {"v": meta(2, 4)}, ValueError, r"kv\[1\]: must be on kv\[0\]'s device cpu, got meta"),
        (
            "pair of one dtype",
            {"v": zeros(2, 4).half()},
            ValueError,
            r"kv\[1\]: dtype must be kv\[0\]'s float32, got flo",
        ),
        ("keys", {"d_v": 9}, ValueError, r"d_v: must be at most d = 8, got 9 \(sizes as of q\)"),
        ("keys", {"d_v": 0}, ValueError, "d_v: must be at least 1, got 0"),
        (
            "keys",
            {"window": 3},
            ValueError,
            r"indices: shape must be \[3, 3\], got \[3, 2\] \(sizes as of q and window\)",
        ),
        ("keys", {"kv": zeros(5, 8)}, ValueError, "kv: dtype must be q's float16 or uint8, got float32"),
        ("keys", {"q": zeros(3, 8)}, ValueError, "kv: dtype must be q's float32 or uint8, got float16"),
        ("branches", {"outs": zeros(2, 2, 3, 4)}, TypeError, "outs: must be a list of tensors, got Tensor"),
        ("branches", {"outs": []}, ValueError, "outs: must be a list of at least one tensor, got none"),
        ("branches", {"lses": [zeros(2, 3)]}, ValueError, "lses: must be a list of as many tensors as outs, 2, got 1"),
        ("branches", {"outs": [zeros(2, 3, 4), None]}, TypeError, r"outs\[1\]: must be a torch\.Tensor, got NoneType"),
        (
            "branches",
            {"outs": [zeros(2, 3, 4), zeros(1, 3, 4)]},
            ValueError,
            r"outs\[1\]: shape must be \[2, 3, 4\], got \[1, 3, 4\] \(sizes as of outs\[0\]\)",
        ),
        (
            "branches",
            {"outs": [zeros(2, 3, 4), zeros(2, 3, 4).half()]},
            ValueError,
            r"outs\[1\]: dtype must be outs\[0\]'s float32, got float16",
        ),
        (
            "branches",
            {"lses": [zeros(2, 3), meta(2, 3)]},
            ValueError,
            r"lses\[1\]: must be on outs\[0\]'s device cpu, got meta",
        ),
        ("branches", {"sink": zeros(2)}, ValueError, r"sink: shape must be \[3\], got \[2\] \(sizes as of outs\[0\]\)"),
    ],
)
def test_a_wrong_argument_is_named(name, changes, error, message):
    with pytest.raises(error, match=message):
        SPECS[name].check(*(CALLS[name] | changes).values())


def test_a_rule_sees_the_arguments_that_it_names():
    seen = []
    few = Arguments(rule=lambda k, *, x: seen.append((k, x)), x=Tensor("T", F32), y=Tensor("T", F32), k=Int())
    x = zeros(3)
    few.check(x, torch.ones(3), 2)
    assert len(seen) == 1 and seen[0][0] == 2 and seen[0][1] is x


@pytest.mark.parametrize(
    ("rule", "got"), [(lambda x, n: None, "n"), (lambda x, *y: None, r"\*y"), (lambda **k: None, r"\*\*k")]
)
def test_a_rule_that_names_no_argument_is_refused(rule, got):
    with pytest.raises(TypeError, match=f"rule: must take arguments by their names, x, k, got {got}"):
        Arguments(rule=rule, x=Tensor("T", F32), k=Int())


def shifted(x, elements):
    """Return a copy of x that starts `elements` elements after a multiple of 16 bytes."""
    buffer = torch.zeros(x.numel() + elements, dtype=x.dtype)
    buffer[elements:] = x.flatten()
    return buffer[elements:].view(x.shape)


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
def test_memory_that_a_kernel_does_not_take_is_refused(layout, x, message):
    assert_refused(message, check_layout, "x", x, layout)


EITHER = Arguments(x=Tensor("T D", FLOATS, layout=lambda x: CONTIGUOUS if x.dtype == torch.float32 else INNER))


@pytest.mark.parametrize(
    ("arguments", "accepted", "refused", "message"),
    [
        # The required layout can depend on the tensor.
        (EITHER, [WIDE[:, :8].bfloat16()[:, :4]], [WIDE[:, :8]], "x: must be contiguous"),
        (
            SPECS["branches"],
            CALLS["branches"].values(),
            [[zeros(2, 3, 4), zeros(2, 3, 8)[..., ::2]], [zeros(2, 3)] * 2, None],
            r"outs\[1\]: the last dimension must be contiguous",
        ),
    ],
)
def test_the_layouts_of_a_call(arguments, accepted, refused, message):
    arguments.check_layouts(*accepted)
    assert_refused(message, arguments.check_layouts, *refused)


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
    message = r"x: dimensions 0 to 2 must be mergeable .*, got shape \[2, 2, 4, 6\]"
    assert_refused(message, merged.check_layouts, apart, None, None)
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
        ((INNER, ROWS), WIDE[:1, :1].as_strided((1, 1), (7, 3))),  # one element: its strides are arbitrary
        ((INNER, ROWS), torch.zeros(())),
        ((INNER, ROWS), torch.zeros(4, 0)),
        ((ROWS,), torch.zeros(5, 24)[:, :17]),
        ((ROWS,), torch.zeros(5, 3, 8).transpose(0, 1)),
        ((ROWS,), torch.zeros(3)),
        ((ROWS,), torch.zeros(5, 4).as_strided((5, 1), (4, 3))),
        ((ROWS,), torch.zeros(2, 7)[:1, :5]),  # the stride of a single row is arbitrary
        ((ROWS,), torch.zeros(8).expand(5, 8)),
        ((ROWS,), shifted(torch.zeros(4, 8), 4)),
        ((CONTIGUOUS, ALIGNED), WIDE),
        ((CONTIGUOUS, ALIGNED), torch.zeros(9)[1:].view(1, 8)[:, :0]),
    ],
)
def test_memory_that_a_kernel_takes(layouts, x):
    for layout in layouts:
        check_layout("x", x, layout)


def test_a_quotient_of_a_bound_name_is_checked():
    halves = Arguments(x=Tensor("T R", FLOATS), cos=Tensor("T R/2", F32), sin=Tensor("T R/2", F32))
    x, cos = torch.zeros(3, 64), torch.zeros(3, 32)
    halves.check(x, cos, cos)
    for wrong in (torch.zeros(3, 39), torch.zeros(3, 64)):
        assert_refused(r"sin: shape must be \[3, 32\], got", halves.check, x, cos, wrong)
        assert_refused(r"cos: shape must be \[3, 32\], got", halves.check, x, wrong, cos)
