"""The collapses, hyper_expand and hyper_head on the GPU: every size and option, strides, non-finite numbers, and the
projection of the layer HyperConnection."""

import pytest
import torch

import dsa
from dsa.cases import cases_of
from dsa.cases.elementwise import NEIGHBOUR
from dsa.testing import assert_close
from dsa_layers.engine.fuse import fuse
from dsa_layers.layers.hyper_connections import HyperConnection
from tests.gpu.case_checks import (
    FLOATS,
    by_dtype,
    by_sizes,
    check_layouts,
    check_rows_alone,
    grid,
    spoiled_rows,
    verify,
)
from tests.gpu.op_checks import assert_same_bits

CASES = COLLAPSE, INDEPENDENT, EXPAND, HEAD = cases_of("hyper_connections")
by_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


@by_sizes(
    grid(tokens=(1, 7, 128, 1025, 4096), channels=(8, 256, 2056, 4096, 7168, 8192), dtype=FLOATS),
    grid(tokens=(9,), channels=(16384,), dtype=FLOATS[:2]),  # in fp32 the kernels accept at most 8192 channels
)
def test_every_size_is_right(sizes, record_error):
    for case in CASES:
        verify(case, sizes, record_error)
    verify(EXPAND, sizes | {"mixed": False}, record_error)
    x, *others = (case.run(case.arguments("cuda", **sizes)) for case in (HEAD, COLLAPSE, INDEPENDENT))
    for into, *_ in others:
        assert_same_bits(x, [into])


@by_sizes(
    [
        {"tokens": 50, "channels": 512, "dtype": torch.float32, **options}
        for options in [{"iterations": 1}, {"iterations": 3}, {"eps": 0.5, "hc_eps": 0.1}, {"hc_eps": 0.0}]
    ]
)
def test_every_option_is_right(sizes, record_error):
    verify(COLLAPSE, sizes, record_error)


@by_sizes(
    [
        {"tokens": 50, "channels": 512, "dtype": torch.float32, **options}
        for options in [{"magnitude": 0.0}, {"magnitude": -3.0, "eps": 0.5}, {"magnitude": 100.0, "hc_eps": 0.0}]
    ]
)
def test_every_option_of_independent_streams_is_right(sizes, record_error):
    verify(INDEPENDENT, sizes, record_error)


@pytest.mark.parametrize("size", [0.0, 30.0, 1e4, 1e30])
@by_dtype
def test_large_logits_are_right(size, dtype):
    given = COLLAPSE.arguments("cuda", tokens=600, channels=512, dtype=dtype, size=size, iterations=20)
    found = COLLAPSE.run(given)
    assert all(x.isfinite().all() for x in found)
    exact = dsa.reference.hyper_collapse(**given | {"streams": given["streams"].float()})
    assert_close("x", found[0], exact[0], abs_tol=1e-4, rel_tol=max(NEIGHBOUR[dtype], 1e-4), cos_tol=1e-5)
    assert_close("post", found[1], exact[1], abs_tol=1e-4, rel_tol=1e-4)
    # Logits of 1e4 have an fp32 error of 1e-3. If two logits nearly tie, their softmax weights have an error of about
    # 1e-3, too.
    assert_close("comb", found[2], exact[2], abs_tol=5e-3, rel_tol=1e-3, cos_tol=1e-5)


@by_case
def test_zeros_are_right(case):
    given = case.arguments("cuda", tokens=5, channels=256)
    for name in {"y", "streams"} & given.keys():
        given[name].zero_()
    assert not case.run(given)[0].any()
    # The logits are mix / rms(streams). With zero streams and an eps of 1e-6, their fp32 error exceeds the check's
    # tolerance.
    case.check_call(given | ({"eps": 1.0} if "eps" in given else {}))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize(
    ("case", "place"),
    [
        *((case, ("streams", 6, 0, 3)) for case in (COLLAPSE, INDEPENDENT, EXPAND)),
        *((COLLAPSE, ("mix", 6, 3)), (INDEPENDENT, ("mix", 6, 3)), (EXPAND, ("comb", 6, 0, 3))),
    ],
)
@pytest.mark.parametrize("tokens", [10, 4099])
def test_what_is_not_finite_stays_in_its_token(tokens, case, place, value):
    given = case.arguments("cuda", tokens=tokens, channels=256)
    case.check(given, spoiled_rows(case.run, given, {place: value}))


@by_case
@pytest.mark.parametrize("channels", [8, 264, 4096])
def test_layouts_change_no_bit(channels, case):
    check_layouts(case, ("y", "streams") if case is EXPAND else ("streams",), tokens=30, channels=channels)


@by_case
@pytest.mark.parametrize("channels", [256, 7168])
def test_a_token_does_not_depend_on_the_others(channels, case):
    given = case.arguments("cuda", tokens=4100, channels=channels)
    names = [name for name in ("y", "streams", "post", "comb", "mix") if name in given]
    check_rows_alone(case.run, given, names, [(0, 4100), (0, 1), (4001, 7), (77, 2049)])


def test_a_captured_projection_follows_loaded_weights():
    """Loading writes the three bf16 parts of new weights to the memory that the graph reads."""
    layers = [HyperConnection(512, 4).cuda() for _ in range(2)]
    streams, graph = torch.randn(9, 4, 512, device="cuda").bfloat16(), torch.cuda.CUDAGraph()
    for each in layers:
        torch.nn.init.normal_(each.fn)
    layer, other = map(fuse, layers)
    with torch.inference_mode():
        layer.project(streams)  # loads the kernel before the capture
        with torch.cuda.graph(graph):
            mix = layer.project(streams)
    for source in (layer, other):
        layer.load_state_dict(source.state_dict())
        graph.replay()
        torch.cuda.synchronize()
        expected = streams.flatten(1).double() @ layer.fn.double().T
        assert_close("mix", mix, expected, abs_tol=2e-3, rel_tol=1e-4)
