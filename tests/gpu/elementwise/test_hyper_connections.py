"""The hyper-connections' kernels beside the references, and the layer's projection through bf16 parts."""

from itertools import product

import pytest
import torch

import dsa
from dsa.reference.elementwise import hyper_connections as reference
from dsa.testing import assert_close, poison_free_memory
from dsa_layers.layers.hyper_connections import HyperConnection
from tests.gpu.op_checks import assert_same_bits, replays

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
# A result rounds once, of sums in another order: to its neighbour now and then.
REL = {torch.bfloat16: 2.01 / 256, torch.float16: 2.01 / 2048, torch.float32: 2e-5}
COS = {torch.bfloat16: 1e-5, torch.float16: 1e-6, torch.float32: 1e-9}


def collapse_inputs(tokens, d, dtype, logits=1.0):
    streams = torch.randn(tokens, 4, d, device="cuda").to(dtype)
    mix, base = torch.randn(tokens, 24, device="cuda") * logits, torch.randn(24, device="cuda")
    return streams, mix, base, torch.rand(3, device="cuda") + 0.5


def expand_inputs(tokens, d, dtype):
    y, streams = torch.randn(tokens, d, device="cuda").to(dtype), torch.randn(tokens, 4, d, device="cuda").to(dtype)
    return y, streams, torch.rand(tokens, 4, device="cuda") * 2, torch.rand(tokens, 4, 4, device="cuda")


def check_collapse(got, inputs, **options):
    """Largest error of x."""
    expected = reference.hyper_collapse(*inputs, **options)
    for name, ours, theirs in zip(("post", "comb"), got[1:], expected[1:]):
        assert_close(name, ours, theirs, abs_tol=2e-6, rel_tol=3e-5)
    dtype = inputs[0].dtype
    return assert_close("x", got[0], expected[0], abs_tol=2e-5, rel_tol=REL[dtype], cos_tol=COS[dtype])


def check_expand(got, inputs):
    dtype = inputs[1].dtype
    expected = reference.hyper_expand(*inputs)
    return assert_close("streams", got, expected, abs_tol=2e-5, rel_tol=REL[dtype], cos_tol=COS[dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("tokens", "d"), [*product((0, 1, 7, 128, 1025, 4096), (8, 256, 2056, 4096, 7168, 8192)), (9, 16384)]
)
def test_against_the_reference(tokens, d, dtype, record_error):
    d = min(d, 8192) if dtype == torch.float32 else d  # the most that the kernel takes of fp32
    collapsed, expanded = collapse_inputs(tokens, d, dtype), expand_inputs(tokens, d, dtype)
    poison_free_memory(mebibytes=64)
    record_error(check_collapse(dsa.hyper_collapse(*collapsed), collapsed))
    poison_free_memory(mebibytes=64)
    record_error(check_expand(dsa.hyper_expand(*expanded), expanded))


@pytest.mark.parametrize(
    "options", [{"iterations": 1}, {"iterations": 3}, {"eps": 0.5, "hc_eps": 0.1}, {"hc_eps": 0.0}]
)
def test_options(options):
    inputs = collapse_inputs(50, 512, torch.float32)
    check_collapse(dsa.hyper_collapse(*inputs, **options), inputs, **options)


@pytest.mark.parametrize("logits", [0.0, 30.0, 1e4, 1e30])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_large_logits(logits, dtype):
    inputs = collapse_inputs(600, 512, dtype, logits)
    x, post, comb = dsa.hyper_collapse(*inputs)
    assert x.isfinite().all() and post.isfinite().all() and comb.isfinite().all()
    exact = reference.hyper_collapse(inputs[0].float(), *inputs[1:])
    assert_close("x", x, exact[0], abs_tol=1e-4, rel_tol=max(REL[dtype], 1e-4), cos_tol=1e-5)
    # Logits of 1e4 are known to 1e-3, and so are the powers of two that are nearly equal.
    assert_close("post", post, exact[1], abs_tol=1e-4, rel_tol=1e-4)
    assert_close("comb", comb, exact[2], abs_tol=5e-3, rel_tol=1e-3, cos_tol=1e-5)


def test_zeros():
    streams, *rest = collapse_inputs(5, 256, torch.bfloat16)
    given = (streams * 0, *rest)
    got = dsa.hyper_collapse(*given)
    check_collapse(got, given)
    y, streams, *weights = expand_inputs(5, 256, torch.bfloat16)
    assert not got[0].any() and not dsa.hyper_expand(y * 0, streams * 0, *weights).any()


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("of", ["streams", "mix"])
@pytest.mark.parametrize("tokens", [10, 4099])
def test_what_is_not_finite_stays_in_its_token(tokens, of, value):
    others = torch.arange(tokens, device="cuda") != 6
    inputs = collapse_inputs(tokens, 256, torch.bfloat16)
    clean = dsa.hyper_collapse(*inputs)
    inputs[0 if of == "streams" else 1][6].view(-1)[3] = value
    found, expected = dsa.hyper_collapse(*inputs), reference.hyper_collapse(*inputs)
    assert_same_bits([x[others] for x in found], [x[others] for x in clean])
    assert all(torch.equal(x[6].isnan(), y[6].isnan()) for x, y in zip(found, expected))
    inputs = expand_inputs(tokens, 256, torch.bfloat16)
    clean = dsa.hyper_expand(*inputs)
    inputs[1 if of == "streams" else 3][6].view(-1)[3] = value
    found = dsa.hyper_expand(*inputs)
    assert torch.equal(found[others], clean[others]) and not found[6].isfinite().all()


def test_rows_of_wider_tensors():
    """What lies between the rows is NaN, and stays."""
    for d in (8, 264, 4096):
        wide = torch.full((30, 6, d + 64), torch.nan, device="cuda").bfloat16()
        streams, y = wide[:, 1:5, 8 : d + 8], wide[:, 5, 8 : d + 8]
        streams.normal_()
        y.normal_()
        inputs = (streams, *collapse_inputs(30, d, torch.bfloat16)[1:])
        check_collapse(dsa.hyper_collapse(*inputs), inputs)
        inputs = (y, streams, *expand_inputs(30, d, torch.bfloat16)[2:])
        check_expand(dsa.hyper_expand(*inputs), inputs)
        assert wide.isnan().sum() == 30 * (6 * (d + 64) - 5 * d)


@pytest.mark.parametrize("d", [256, 7168])
def test_runs_are_bit_identical_whatever_the_other_tokens(d):
    (streams, mix, *rest), expanded = collapse_inputs(4100, d, torch.bfloat16), expand_inputs(4100, d, torch.bfloat16)
    whole = (*dsa.hyper_collapse(streams, mix, *rest), dsa.hyper_expand(*expanded))
    for start, count in ((0, 4100), (0, 1), (4001, 7), (77, 2049)):
        part = slice(start, start + count)
        got = dsa.hyper_collapse(streams[part], mix[part], *rest), dsa.hyper_expand(*(x[part] for x in expanded))
        assert_same_bits(got, [x[part] for x in whole])


def test_graph_replay_with_new_numbers():
    def inputs():
        return (*collapse_inputs(33, 4096, torch.bfloat16), *expand_inputs(33, 4096, torch.bfloat16))

    def run(*given):
        return *dsa.hyper_collapse(*given[:4]), dsa.hyper_expand(*given[4:])

    given = inputs()
    for held in replays(run, given, inputs):
        assert_same_bits(held, run(*given))


@pytest.mark.parametrize("tokens", [1, 64, 1000])
def test_the_layers_projection(tokens, record_error):
    layer = HyperConnection(4096, 4).cuda()
    torch.nn.init.normal_(layer.fn, std=0.02)
    streams = torch.randn(tokens, 4, 4096, device="cuda").bfloat16()
    exact = streams.flatten(1).double() @ layer.fn.double().T
    with torch.inference_mode():
        # Sums of 16384 products in fp32, some of them in the tensor cores, which cut where others round.
        record_error(assert_close("mix", layer.project(streams), exact, abs_tol=5e-4, rel_tol=1e-4))


def test_a_captured_projection_follows_the_weights():
    """One that was captured with parts at hand reads those that are made when weights are loaded; one that was not
    makes them itself."""
    layer, other = (HyperConnection(512, 4).cuda() for _ in range(2))
    streams = torch.randn(9, 4, 512, device="cuda").bfloat16()
    torch.nn.init.normal_(other.fn)
    for warm in (False, True):
        torch.nn.init.normal_(layer.fn)
        with torch.inference_mode():
            if warm:
                layer.project(streams)
            else:
                HyperConnection(512, 4).cuda().project(streams)  # the kernel is loaded
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                mix = layer.project(streams)
        for source in (layer, other):
            layer.load_state_dict(source.state_dict())
            graph.replay()
            torch.cuda.synchronize()
            expected = streams.flatten(1).double() @ layer.fn.double().T
            assert_close("mix", mix, expected, abs_tol=2e-3, rel_tol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("d", [8, 2056, 4096, 8192])
@pytest.mark.parametrize("tokens", [0, 1, 7, 1025, 4099])
def test_head(tokens, d, dtype):
    """Beside the reference, and to the bit what goes into a sublayer of the same numbers."""
    streams, mix, base, scale = collapse_inputs(tokens, d, dtype)
    given = streams, mix[:, :4].contiguous(), base[:4], scale[:1]
    poison_free_memory(mebibytes=64)
    x = dsa.hyper_head(*given)
    assert_close("x", x, reference.hyper_head(*given), abs_tol=2e-5, rel_tol=REL[dtype], cos_tol=COS[dtype])
    assert torch.equal(x, dsa.hyper_collapse(streams, mix, base, scale)[0])
