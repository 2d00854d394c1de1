"""flash_mla_sparse_fwd (sparse MLA prefill) on the GPU: many sizes, the shared tests of ops with selected keys, and
calls without keys."""

from itertools import product

import pytest

from dsa.testing import poison_free_memory
from tests.gpu.attention import BF16, D_V, FP16, INF, KINDS, case_of, checked
from tests.gpu.mla.selected_keys import Op, SelectedKeys, with_nan_rows

CASE = case_of("flash_mla_sparse_fwd")
PLAIN = {"counted": False, "sink": False, "invalid": 0.0}
SIZES = [
    *((33, h, 3000, 320, {"sink": True, "invalid": 0.1}) for h in (1, 8, 16, 32, 64, 80, 128)),
    # Fewer queries than an H200's 132 SMs, about as many, and more. 2048 selected keys are those of V3.2.
    *((t, h, 8192, 2048, {}) for t, h in ((1, 1), (1, 128), (20, 64), (131, 64), (133, 128))),
    (1500, 128, 8192, 512, {}),
    *((7, h, 5000, k, {}) for h in (16, 64, 128) for k in (1, 2, 63, 64, 65, 128, 192, 512, 1000, 2047, 2048)),
    *((t, h, n, 200, {}) for t, n, h in product((0, 1, 3, 257), (1, 63, 5000), (16, 128))),
]
NO_KEYS = [(3, 128, 100, 0), (1, 16, 100, 0), (0, 128, 100, 64), (3, 0, 100, 64), (0, 0, 100, 0), (5, 64, 0, 64)]


def inputs(tokens, heads, keys, top_k, **options):
    return CASE.arguments("cuda", tokens=tokens, heads=heads, keys=keys, top_k=top_k, **PLAIN | options)


@pytest.fixture(params=product((16, 128), [(576, BF16), (512, FP16)]), ids=str)
def op(request):
    heads, (d, dtype) = request.param

    def make(*sizes, **options):
        return with_nan_rows(inputs(*sizes, d=d, dtype=dtype, **options))

    return Op(CASE, make, heads)


class TestSelectedKeys(SelectedKeys):
    """Run the shared tests with 128 and with 16 heads, for which different kernels run."""


@pytest.mark.parametrize(("d", "dtype"), KINDS, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_sizes_are_right(sizes, d, dtype, record_error):
    tokens, heads, keys, top_k, options = sizes
    out, *_ = checked(CASE, inputs(tokens, heads, keys, top_k, d=d, dtype=dtype, **options), record_error)
    assert out.shape == (tokens, heads, D_V)


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize(
    "sizes",
    [
        *((t, h, 3000, k) for t, h, k in product((1, 33, 257), (1, 16, 32, 33, 64), (1, 31, 32, 33, 257, 2048))),
        (70000, 2, 300, 40),  # more queries than the 65535 CTAs of a grid's y dimension
    ],
    ids=str,
)
def test_narrow_keys_are_right(sizes, dtype, record_error):
    out, *_ = checked(CASE, inputs(*sizes, d=160, d_v=128, dtype=dtype, sink=True, invalid=0.1), record_error)
    assert out.shape == (*sizes[:2], 128)


@pytest.mark.parametrize("sizes", NO_KEYS, ids=str)
@pytest.mark.parametrize("d", [576, 512])
def test_without_keys_results_are_zero(d, sizes):
    for invalid in (0.0, 1.0):
        poison_free_memory(mebibytes=64)
        out, max_logits, lse = CASE.run(inputs(*sizes, d=d, invalid=invalid, sink=True))
        assert out.shape == (*sizes[:2], D_V) and not out.any() and max_logits.eq(-INF).all() and lse.eq(INF).all()
