"""The hyper-connections with sizes, options, strides and numbers that their cases leave out, and the layer's projection
through bf16 parts."""

from itertools import product

import pytest
import torch

import dsa
from dsa.cases import cases_of
from dsa.cases.elementwise import NEIGHBOUR
from dsa.testing import assert_close, poison_free_memory
from dsa_layers.layers.hyper_connections import HyperConnection
from tests.gpu.op_checks import assert_same_bits

CASES = COLLAPSE, EXPAND, HEAD = cases_of("hyper_connections")
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@by_dtype
@pytest.mark.parametrize(
    ("tokens", "channels"), [*product((1, 7, 128, 1025, 4096), (8, 256, 2056, 4096, 7168, 8192)), (9, 16384)]
)
def test_sizes(tokens, channels, dtype, record_error):
    """And the head gives the bits of the stream that goes into a sublayer."""
    channels = min(channels, 8192) if dtype == torch.float32 else channels  # the most that the kernel takes of fp32
    sizes = {"tokens": tokens, "channels": channels, "dtype": dtype}
    for case in CASES:
        poison_free_memory(mebibytes=64)
        record_error(case.verify("cuda", **sizes))
    x, (into, *_) = (case.run(case.arguments("cuda", **sizes)) for case in (HEAD, COLLAPSE))
    assert_same_bits(x, [into])


@pytest.mark.parametrize(
    "options", [{"iterations": 1}, {"iterations": 3}, {"eps": 0.5, "hc_eps": 0.1}, {"hc_eps": 0.0}], ids=str
)
def test_options(options, record_error):
    record_error(COLLAPSE.verify("cuda", tokens=50, channels=512, dtype=torch.float32, **options))


@pytest.mark.parametrize("size", [0.0, 30.0, 1e4, 1e30])
@by_dtype
def test_large_logits(size, dtype):
    given = COLLAPSE.arguments("cuda", tokens=600, channels=512, dtype=dtype, size=size, iterations=20)
    x, post, comb = dsa.hyper_collapse(**given)
    assert x.isfinite().all() and post.isfinite().all() and comb.isfinite().all()
    exact = dsa.reference.hyper_collapse(**given | {"streams": given["streams"].float()})
    assert_close("x", x, exact[0], abs_tol=1e-4, rel_tol=max(NEIGHBOUR[dtype], 1e-4), cos_tol=1e-5)
    # Logits of 1e4 are known to 1e-3, and so are the powers of two that are nearly equal.
    assert_close("post", post, exact[1], abs_tol=1e-4, rel_tol=1e-4)
    assert_close("comb", comb, exact[2], abs_tol=5e-3, rel_tol=1e-3, cos_tol=1e-5)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_zeros(case):
    given = case.arguments("cuda", tokens=5, channels=256)
    for name in {"y", "streams"} & given.keys():
        given[name].zero_()
    assert not case.run(given)[0].any()
    # With an eps of 1e-6 logits are about 1000, which fp32 does not hold to the precision of the check.
    case.check_call(given | ({"eps": 1.0} if "eps" in given else {}))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("of", [1, 0], ids=["streams", "coefficients"])
@pytest.mark.parametrize("tokens", [10, 4099])
def test_what_is_not_finite_stays_in_its_token(tokens, of, value):
    others = torch.arange(tokens, device="cuda") != 6
    for case, changed in ((COLLAPSE, ("mix", "streams")), (EXPAND, ("comb", "streams"))):
        given = case.arguments("cuda", tokens=tokens, channels=256)
        clean = case.run(given)
        given[changed[of]][6].view(-1)[3] = value
        found = case.run(given)
        case.check(given, found)
        assert_same_bits([x[others] for x in found], [x[others] for x in clean])


@pytest.mark.parametrize("channels", [8, 264, 4096])
def test_rows_of_wider_tensors(channels):
    """NaN between the rows reaches no result and stays."""
    wide = torch.full((30, 6, channels + 64), torch.nan, device="cuda").bfloat16()
    streams, y = (x.normal_() for x in (wide[:, 1:5, 8 : channels + 8], wide[:, 5, 8 : channels + 8]))
    for case in CASES:
        given = case.arguments("cuda", tokens=30, channels=channels) | {"streams": streams}
        case.check_call(given | ({"y": y} if case is EXPAND else {}))
    assert wide.isnan().sum() == 30 * (6 * (channels + 64) - 5 * channels)


@pytest.mark.parametrize("channels", [256, 7168])
def test_a_token_does_not_depend_on_the_others(channels):
    for case in CASES:
        given = case.arguments("cuda", tokens=4100, channels=channels)
        whole = case.run(given)
        for start, count in ((0, 4100), (0, 1), (4001, 7), (77, 2049)):
            part = slice(start, start + count)
            own = {name: given[name][part] for name in ("y", "streams", "post", "comb", "mix") if name in given}
            assert_same_bits(case.run(given | own), [x[part] for x in whole])


@pytest.mark.parametrize("tokens", [1, 64, 1000])
def test_the_layers_projection(tokens, record_error):
    layer = HyperConnection(4096, 4).cuda()
    torch.nn.init.normal_(layer.fn, std=0.02)
    streams = torch.randn(tokens, 4, 4096, device="cuda").bfloat16()
    exact = streams.flatten(1).double() @ layer.fn.double().T
    with torch.inference_mode():
        # Sums of 16384 products in fp32. Some of them are in the tensor cores, which truncate.
        record_error(assert_close("mix", layer.project(streams), exact, abs_tol=5e-4, rel_tol=1e-4))


def test_a_captured_projection_follows_the_weights():
    """A capture with parts at hand reads the parts that are made when weights are loaded. A capture without them makes
    them itself."""
    layer, other = (HyperConnection(512, 4).cuda() for _ in range(2))
    streams = torch.randn(9, 4, 512, device="cuda").bfloat16()
    torch.nn.init.normal_(other.fn)
    for warm in (False, True):
        torch.nn.init.normal_(layer.fn)
        with torch.inference_mode():
            # Either call loads the kernel.
            (layer if warm else HyperConnection(512, 4).cuda()).project(streams)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                mix = layer.project(streams)
        for source in (layer, other):
            layer.load_state_dict(source.state_dict())
            graph.replay()
            torch.cuda.synchronize()
            expected = streams.flatten(1).double() @ layer.fn.double().T
            assert_close("mix", mix, expected, abs_tol=2e-3, rel_tol=1e-4)
