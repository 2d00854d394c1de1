"""The references are compared with the float64 formulas of `dsa.cases`: at the cases' own sizes, with many combinations
of options, and for several chunk sizes.

Further tests cover some references. Strides of the arguments do not change the results. Results are rounded once. Every
differentiable argument gets a gradient.
"""

import importlib
import itertools

import pytest
import torch

from dsa.cases import CASES
from tests.reference.common import BF16, F16, F32, F64, assert_same_bits

FLOATS, HALVES, BOTH = [F32, BF16, F16], [BF16, F16], [True, False]
BY_NAME = {case.name: case for case in CASES}
CHECKED = [case for case in CASES if case.check is not None]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("case", CHECKED, ids=lambda case: case.name)
def test_a_reference_is_right(case, seed):
    case.verify_all("cpu", seed)


def every(*alternatives, **options):
    """Return a list of dicts of sizes: every combination of one alternative and one value of each option."""
    combinations = [dict(zip(options, values)) for values in itertools.product(*options.values())]
    return [first | rest for first in alternatives or ({},) for rest in combinations]


def by_name(*names, of):
    return [dict(zip(names, values)) for values in of]


LAYOUTS = ["float32", "bfloat16", "float16", "v32", "v4"]
CACHE = {"pages": 4, "page_size": 7}
ROTATED = by_name("shape", "rotated", of=[((5, 8), 8), ((4, 3, 24), 16), ((3, 2, 2, 9), 6), ((0, 2, 8), 4)])
ROTATIONS = every(*ROTATED, interleaved=BOTH, dims=["first", "last"], dtype=FLOATS)
NORMED = every(tokens=[7], channels=[384], dtype=FLOATS, use_ue8m0=BOTH, eps=[1e-2])
# Both eps are large and differ, so that a reference that omits or confuses them fails.
STREAMS = every(tokens=[0, 3], n=[1, 2, 4], dtype=[F32], eps=[1e-3], hc_eps=[1e-2])
# (queries, keys) of sequences. The last has more queries than keys.
WINDOWS = {"sequences": ((3, 3), (0, 2), (1, 7), (6, 18), (2, 1)), "heads": 4, "d": 24, "d_v": 16, "dtype": F32}
WINDOWED = every(WINDOWS, window=[1, 2, 5, 128], sink=BOTH)
# With one key and s_q = 4, the first three queries of causal decoding come before the key and see nothing.
DECODED = {"lengths": (9, 0, 1, 2, 17), "d": 24, "d_v": 16, "dtype": F32}
LENGTHS = [[0], [3], [4], [9, 1, 0, 16], [7, 8]]
COMPRESSED = every(c=[16], overlap=BOTH, dtype=[F32])
# (first_expert, count) of 12 experts; None means all experts from first_expert on.
ROUTED = by_name("first_expert", "count", of=[(0, None), (4, 4), (9, None)])
ROUTED = every(*ROUTED, channels=[64], experts=[12], top_k=[3], tokens=[1, 5], dtype=HALVES)
GROUPS = {"scores": "sqrtsoftplus", "n_group": 3, "topk_group": 2}
INDEX_HEADS = by_name("heads", "dim", of=[(1, 16), (4, 128), (32, 32)])
INDEXED = by_name(
    *("rotated", "interleaved", "dims"),
    of=[(64, False, "first"), (64, True, "first"), (32, False, "last"), (128, True, "last"), (10, True, "last")],
)
INDEXED = every(*INDEXED, tokens=[30], dtype=FLOATS, use_ue8m0=BOTH)
PAGED = {"lengths": (17, 0, 1, 3, 33), "heads": 3, "dim": 8, "num_sms": 0}
LEAVES = ("q", "k", "v", "q_idx", "k_idx", "w_idx")
OPTIONS = {
    "rms_norm": every(
        shape=[(8,), (5, 24), (2, 3, 4, 64), (0, 16), (3, 0, 8)], dtype=FLOATS, weighted=BOTH, eps=[1e-2]
    ),
    "rms_norm_rotary": every(tokens=[5], channels=[80], rotated=[2, 64, 80], dtype=[F32], weighted=BOTH),
    "rms_norm_cast_to_fp8": NORMED,
    "add_rms_norm_cast_to_fp8": NORMED,
    "apply_rotary": ROTATIONS,
    "apply_rotary into out": ROTATIONS,
    "hyper_collapse": every(*STREAMS, iterations=[1, 2, 20]),
    "hyper_collapse_independent": every(*STREAMS, magnitude=[0.5, 2.0]),
    "hyper_head": STREAMS,
    "hyper_expand": every(tokens=[0, 3], n=[1, 2, 4], dtype=[F32], mixed=BOTH),
    "hyper_mix": by_name(
        "tokens", "n", "channels", "outputs", of=[(5, 4, 6, 24), (3, 1, 7, 1), (2, 3, 16, 4), (0, 4, 8, 24)]
    ),
    "hyper_expand_mix": every(*by_name("n", "outputs", of=[(4, 24), (1, 3), (2, 5)]), mixed=BOTH),
    "hyper_collapse_norm_cast_to_fp8": every(
        n=[1, 4], use_ue8m0=BOTH, iterations=[2], eps=[0.5], hc_eps=[0.25], norm_eps=[2.0]
    ),
    "hyper_collapse_independent_norm_cast_to_fp8": every(
        n=[1, 4], use_ue8m0=BOTH, magnitude=[3.0], eps=[0.5], hc_eps=[0.25], norm_eps=[2.0]
    ),
    "per_token_cast_to_fp8": every(
        *by_name("shape", "gran_k", of=[((2, 3, 128), 64), ((2, 3, 256), 128)]),
        dtype=FLOATS,
        use_ue8m0=BOTH,
        hadamard=BOTH,
    ),
    "scatter_cast_to_fp8": every(use_ue8m0=BOTH),
    "rotary_cast_to_fp8": every(tokens=[0, 5], heads=[6], dim=[256], groups=[1, 2, 3, 6], use_ue8m0=BOTH),
    "swiglu_cast_to_fp8": every(
        shape=[(2, 3, 256), (5, 200), (0, 200), (3, 0)], use_ue8m0=BOTH, limit=[None, 0.5, 7], dtype=FLOATS
    ),
    "gate_cast_to_fp8": every(shape=[(2, 3, 256), (5, 200), (0, 200), (3, 0)], use_ue8m0=BOTH, dtype=FLOATS),
    # A block larger than the weight contains the whole weight.
    "per_block_cast_to_fp8": every(
        *by_name("rows", "columns", "block", of=[(576, 200, 128), (3, 200, 2**31 - 1), (10, 7, 4)]), use_ue8m0=BOTH
    ),
    "dequantize_per_block": every(
        *by_name("rows", "columns", "block", of=[(576, 200, 128), (3, 200, 2**31 - 1), (10, 7, 4)]),
        dtype=[*FLOATS, F64],
    ),
    "linear_fp32": every(
        *by_name("scale", "scaled_from", of=[(1.0, 0), (0.3, 0), (-2, 7), (0.3, 12)]),
        tokens=[0, 1, 5],
        channels=[64],
        rows=[12],
        dtype=HALVES,
    ),
    "make_v4_cache": every(page_size=[64, 2, 72, 1, 256]),
    "write_kv_cache float": every(CACHE, layout=LAYOUTS, dtype=FLOATS, tokens=[20]),
    "write_kv_cache v32": every(CACHE, use_ue8m0=[False], dtype=FLOATS, tokens=[20]),
    "read_kv_cache float": every(CACHE, layout=LAYOUTS, dtype=FLOATS, shape=[(2, 9)], slot_dtype=[torch.int32]),
    "write_mla_cache float": every(
        *by_name("layout", "d", of=[("float32", 576), ("bfloat16", 512), ("float16", 576)]),
        dtype=FLOATS,
        tokens=[20],
        interleaved=BOTH,
        eps=[1e-6, 0.7],
    ),
    "compress_kv without a state": every(*COMPRESSED, lengths=LENGTHS),
    "compress_kv": [
        {**kind, "lengths": lengths, "starts": [start] * len(lengths), "spare": start % 3}
        for kind, lengths, start in itertools.product(COMPRESSED, LENGTHS, range(9))
    ],
    "quantize_indexer_queries": INDEXED,
    "write_indexer_keys": every(*INDEXED, eps=[1e-6, 0.7]),
    "fp8_mqa_logits": every(*INDEX_HEADS, clean_logits=BOTH),
    "mqa_logits": every(*INDEX_HEADS, dtype=[F32]),
    "fp8_paged_mqa_logits": every(
        PAGED, next_n=[1, 2, 3, 4], page_size=[1, 5, 64], columns=[40, 6], per_query=BOTH, logits_dtype=[F32, BF16]
    ),
    "get_paged_mqa_logits_metadata": every(batch=[1, 3, 40], num_sms=[1, 2, 7, 132], next_n=[0, 3]),
    "flash_mla_with_kvcache dense": every(
        *by_name("heads", "kv_heads", "page", of=[(3, 1, 4), (6, 2, 1), (4, 4, 64)]),
        **{name: [value] for name, value in DECODED.items()},
        s_q=[1, 2, 4],
        causal=BOTH,
        scale=[None, 0.1],
    ),
    "sliding_window_attention": WINDOWED,
    "window_sparse_attention": every(*WINDOWED, entries=[7], top_k=[6], invalid=[0.3], counted=BOTH),
    "window_attention_cast_to_fp8": every(
        {"sequences": ((3, 3), (4, 4)), "heads": 4, "d": 256, "window": 3, "top_k": 5},
        entries=[9, 0],
        dtype=FLOATS,
        use_ue8m0=BOTH,
    ),
    "window_indices": every(sequences=[WINDOWS["sequences"]], window=[1, 2, 5, 128]),
    # A head has 160 rows of kv_b, so heads begin inside the blocks of 128 rows that share a scale.
    "mla_absorb_queries": every(
        *by_name("tokens", "heads", of=[(3, 4), (0, 4)]), nope=[64], rows=[160], latent=[256], dtype=FLOATS
    ),
    "mla_values_cast_to_fp8": every(
        heads=[3],
        v_dim=[256],
        rows=[320],
        latent=[256],
        dtype=[BF16, F32],
        use_ue8m0=BOTH,
    ),
    "combine_experts": every(
        *by_name("shared", "residual", of=[(True, False), (False, True)]),
        tokens=[11],
        k=[5, 0],
        channels=[24],
        dtype=FLOATS,
        index_dtype=[torch.int32, torch.int64],
        weighted=BOTH,
    ),
    "moe_gate": every(
        *by_name("n_group", "topk_group", of=[(1, 1), (4, 2), (4, 4), (8, 3)]),
        scores=["sigmoid", "sqrtsoftplus"],
        top_k=[4],
        normalise=BOTH,
        scale=[1.5],
    ),
    "route_by_table": ROUTED,
    "route_to_experts": [sizes | GROUPS for sizes in ROUTED],
    "indexer_topk": every(
        lengths=[((4, 9), (0, 2), (3, 5), (2, 1), (5, 0))], heads=[3], di=[4], top_k=[1, 3, 20], causal=BOTH
    ),
    "indexer_warmup_attention": every(
        *by_name("dims", "key_heads", of=[((64, 64), 2), ((192, 128), 2), ((576, 512), 1)]),
        causal=BOTH,
        leaves=[LEAVES],
    ),
    "sparse_indexer_loss": every(d=[512], joint=[None, 5.0, 40.0]),
    "sparse_mla_attention": every(d=[512, 576], sink=BOTH, dtype=HALVES),
}


@pytest.mark.parametrize(("name", "sizes"), [(name, sizes) for name, rows in OPTIONS.items() for sizes in rows])
def test_a_reference_is_right_for_every_option(name, sizes):
    BY_NAME[name].verify(**sizes)


# (constant of dsa.reference, values to set it to, case, sizes). The constants limit how many queries a reference
# computes at a time.
CHUNKED = [
    (
        "indexer.fp8_mqa_logits._CHUNK",
        [2**24, 3 * 37 * 4, 1],
        "fp8_mqa_logits compressed",
        every(keys=[37], heads=[4], dim=[16], max_seqlen_k=[1, 10, 300]),
    ),
    (
        "mla.softmax_attention._CPU_CHUNK",
        [2**24, 2 * 5 * 24],
        "flash_mla_sparse_fwd",
        every(
            *by_name("dtype", "d", "d_v", of=[(F32, 24, 16), (F16, 512, 512)]),
            **{"tokens": [5], "heads": [4], "keys": [7], "top_k": [5], "invalid": [0.3], "sink": BOTH, "counted": BOTH},
        ),
    ),
    # `more` adds queries that belong to no sequence.
    (
        "mla.mha_varlen_fwd._CHUNK",
        [2**26, 100],
        "mha_varlen_fwd",
        every(
            {
                "sequences": ((4, 7), (0, 1), (5, 140), (3, 2), (2, 0)),
                "dims": (6, 5),
                "rope": 0,
                "dtype": F32,
                "more": 2,
            },
            causal=BOTH,
            top_k=[0, 60],
            sinks=BOTH,
        ),
    ),
]


@pytest.mark.parametrize(
    ("constant", "value", "name", "sizes"),
    [(constant, value, name, x) for constant, values, name, sizes in CHUNKED for value in values for x in sizes],
)
def test_every_number_of_queries_at_a_time_is_right(constant, value, name, sizes, monkeypatch):
    module, attribute = constant.rsplit(".", 1)
    monkeypatch.setattr(importlib.import_module(f"dsa.reference.{module}"), attribute, value)
    BY_NAME[name].verify(**sizes)


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("hyper_mix", {"n": 1, "channels": 64}),
        ("hyper_mix", {"n": 4, "channels": 64}),
        ("linear_fp32", {"tokens": 4, "rows": 12, "scaled_from": 8}),
    ],
)
def test_strides_change_no_bit(name, sizes):
    """PyTorch's products sum column-major matrices in another order, so the references must not pass strides on."""
    given = BY_NAME[name].arguments(**sizes)
    tensors = {key: x for key, x in given.items() if isinstance(x, torch.Tensor)}
    transposed = {key: x.transpose(0, -1).contiguous().transpose(0, -1) for key, x in tensors.items()}
    assert_same_bits(BY_NAME[name].run(given | transposed), BY_NAME[name].run(given))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    "name", ["rms_norm", "hyper_collapse", "hyper_collapse_independent", "hyper_expand", "hyper_head"]
)
def test_results_are_rounded_once(name, dtype):
    case = BY_NAME[name]
    given = case.arguments(dtype=dtype)
    floats = {name: x.float() if isinstance(x, torch.Tensor) else x for name, x in given.items()}
    for got, exact in zip(case.run(given), case.run(floats), strict=True):
        assert torch.equal(got, exact.to(got.dtype))


# Floating-point arguments without a gradient: the bias only affects the choice of experts.
WITHOUT_GRADIENTS = {"moe_gate": {"bias"}, "route_to_experts": {"bias"}}


@pytest.mark.parametrize(
    "name",
    [
        *("hyper_collapse", "hyper_collapse_independent", "hyper_expand", "hyper_mix", "hyper_expand_mix"),
        *("moe_gate", "route_to_experts", "route_by_table", "mha_varlen_fwd"),
    ],
)
def test_gradients_reach_every_real_argument(name):
    given = BY_NAME[name].arguments()
    leaves = {key: x for key, x in given.items() if isinstance(x, torch.Tensor) and x.is_floating_point()}
    for x in leaves.values():
        x.requires_grad_()
    found = [x.float().square().sum() for x in BY_NAME[name].run(given) if x.requires_grad]
    sum(found).backward()
    for key, x in leaves.items():
        if key not in WITHOUT_GRADIENTS.get(name, ()):
            assert x.grad.isfinite().all() and x.grad.any(), key
