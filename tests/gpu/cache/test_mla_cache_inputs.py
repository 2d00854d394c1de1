"""What attention caches: layouts and dtypes, numbers that are not finite, strides, 64-bit offsets."""

import pytest
import torch

import dsa
from dsa.cases import cases_of
from dsa.cases.cache import as_kept, same, unrounded
from dsa.testing import assert_close, poison_free_memory, poisoned
from tests.gpu.op_checks import assert_same_bits, far_apart

CASE = cases_of("mla_cache_inputs")[0]
FLOATS = [torch.bfloat16, torch.float16, torch.float32]
# The cache's layout and d.
CACHES = [*((name, d) for name in ("bfloat16", "float16", "float32") for d in (576, 512)), ("v32", 576), ("v4", 512)]
SOME = [("bfloat16", 576), ("float16", 512), *CACHES[-2:]]


@pytest.mark.parametrize("use_ue8m0", [True, False])
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("layout", "d"), CACHES)
def test_write(layout, d, dtype, interleaved, use_ue8m0, record_error):
    """With `out` and without it."""
    if layout == "v4" and not use_ue8m0:
        return
    options = {"eps": 1e-5, "interleaved": interleaved, "use_ue8m0": use_ue8m0, "outside": True}
    for slot_dtype, kept in ((torch.int64, True), (torch.int32, False)):
        poison_free_memory(mebibytes=16)
        sizes = {"layout": layout, "d": d, "dtype": dtype, "slot_dtype": slot_dtype, "tokens": 501, "kept": kept}
        record_error(CASE.verify("cuda", **sizes, **options))


@pytest.mark.parametrize(
    ("layout", "d", "page_size", "tokens"),
    [
        *((*kind, page_size, 100) for kind in SOME for page_size in (1, 3, 7, 1000)),
        *((*kind, 64, tokens) for kind in SOME for tokens in (0, 1, 3, 4, 5, 33, 5000)),
    ],
)
def test_page_sizes_and_counts(layout, d, page_size, tokens):
    CASE.verify("cuda", layout=layout, d=d, page_size=page_size, pages=2 + tokens // page_size, tokens=tokens)


def test_strided_inputs():
    """The latent projection as a part of wider rows, angles in any strides, rows into a wider tensor."""
    given, other = (CASE.arguments("cuda", layout="v32", tokens=20) for _ in range(2))
    dsa.write_mla_cache(**given)
    wide, wide_out = (poisoned((20, 3 * 576), torch.bfloat16, "cuda") for _ in range(2))
    wide[:, 576:1152] = other["kv"]
    angles = torch.stack((other["cos"], other["sin"]), 2)  # strides of 2
    other |= {"kv": wide[:, 576:1152], "cos": angles[..., 0], "sin": other["sin"].T.contiguous().T}
    dsa.write_mla_cache(**other | {"out": wide_out[:, 576:1152]})
    assert_same_bits((other["cache"], wide_out[:, 576:1152]), (given["cache"], given["out"]))
    assert wide_out[:, :576].isnan().all() and wide_out[:, 1152:].isnan().all()


def test_a_single_row_of_any_stride():
    given, other = (CASE.arguments("cuda", layout="v32", tokens=1) for _ in range(2))
    dsa.write_mla_cache(**given)
    dsa.write_mla_cache(**other | {"kv": other["kv"].as_strided((1, 576), (7, 1))})
    assert_same_bits((other["cache"], other["out"]), (given["cache"], given["out"]))


@pytest.mark.parametrize(("layout", "d"), CACHES[4:])
@pytest.mark.parametrize("dtype", FLOATS)
def test_numbers_that_are_not_finite(dtype, layout, d):
    """They stay in their row, and in the norm's or rope's channels, as in the reference on the CPU."""
    given = CASE.arguments("cuda", layout=layout, d=d, tokens=8, dtype=dtype)
    kv, given["slots"] = given["kv"], torch.arange(8, device="cuda")
    kv[1, 2], kv[2, 300], kv[3, 447], kv[4], kv[5, -1] = torch.nan, torch.inf, -torch.inf, 0.0, torch.nan
    kv[6, -2] = torch.inf
    rows = unrounded(given)
    on_cpu = {name: x.cpu() if isinstance(x, torch.Tensor) else x for name, x in given.items()}
    expected, eps = unrounded(on_cpu).cuda(), torch.finfo(dtype).eps
    for what in (torch.isnan, torch.isinf):
        assert torch.equal(what(rows), what(expected))
    finite = [x.nan_to_num(7, 7, 7) for x in (rows, expected)]
    assert_close("rows", *finite, abs_tol=128 * eps, rel_tol=4 * eps)
    dsa.write_mla_cache(**given)
    same("out", given["out"], as_kept(given, rows))


@pytest.mark.parametrize(("layout", "d"), [("bfloat16", 512), ("v32", 576), ("v4", 512)])
def test_pages_far_apart(layout, d):
    given = CASE.arguments("cuda", layout=layout, d=d, tokens=300)
    far = far_apart(given["cache"])
    for cache in (far, given["cache"]):
        dsa.write_mla_cache(**given | {"cache": cache})
    assert_same_bits(far, given["cache"])
