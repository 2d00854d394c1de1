"""The baselines (plain PyTorch) compute the same results as our ops, in cases with small shapes on a CPU."""

import ast
from pathlib import Path

import pytest
import torch

from dsa_bench.harness import case as cases

SHAPES = {
    "combine_experts": [(8, 6, 256)],
    "compressed_kv": [
        *((512, 1, *kind) for kind in ((512, 4, "v4"), (512, 128, "v4"), (128, 4, "index"))),
        *((1, 4, *kind) for kind in ((512, 4, "v4"), (512, 128, "v4"), (128, 4, "index"))),
    ],
    "expert_routing": [(8, 256, 8, 8, 4, "sigmoid"), (8, 256, 6, 1, 1, "sqrtsoftplus")],
    "hyper_connections": [(op, 4, 256) for op in ("collapse", "expand", "head", "mix and collapse")],
    "hyper_mix": [(4, 256)],
    "indexer_inputs": [(128, "keys")],
    "indexer_topk": [(2, 64, 8, 32, 16)],
    "kv_cache": [(128, what, layout) for what in ("write", "read") for layout in ("V3.2", "V4", "bf16")],
    "linear_fp32": [(8, 64, 512)],
    "mla_absorb_queries": [(4, 4, 128, 256)],
    "mla_cache_inputs": [(128, layout, keep) for layout in ("V3.2", "V4") for keep in (True, False)],
    "mla_values_cast_to_fp8": [(4, 4, 128, 256)],
    "rms_norm": [(16, 256, True), (16, 256, False), (16, 256, True, True)],
    "rotary": [(4, 8, 512, True, "last", False), (4, 8, 512, True, "last", True)],
    "route_by_table": [(8, 256, 256, 6)],
    "scatter_cast_to_fp8": [(16, 512, 8)],
    "slot_mapping": [("tokens", 2, 16), ("all keys", 2, 16), ("entries", 2, 1), ("ring", 2, 1)],
    "swiglu_cast_to_fp8": [(16, 256, True, None), (16, 256, False, 10.0)],
    "topk_indices": [(4, 300, "indexer", 16)],
    "window_indices": [("indices", 8), ("slots", 4)],
}
WRITERS = {"compressed_kv": (1, 4, 512, 4, "v4"), "indexer_inputs": (128, "keys"), "kv_cache": (128, "write", "V4")}
WRITERS["mla_cache_inputs"] = (128, "V3.2", False)


@pytest.mark.parametrize("op", SHAPES)
def test_baselines_agree_with_ours(op, no_peers, on_cpu):
    for shape in SHAPES[op]:
        torch.manual_seed(0)
        case = cases.load(op).case(*shape)
        assert case.baselines & case.calls.keys() and case.tried() == {}, shape


@pytest.mark.parametrize("op", WRITERS)
def test_a_baseline_that_writes_nothing_differs(op, no_peers, on_cpu):
    case = cases.load(op).case(*WRITERS[op])
    (name,) = case.baselines
    written = case.calls[name][0]()
    for tensor in (written,) if isinstance(written, torch.Tensor) else written[:1]:
        tensor.zero_()
    case.calls[name][:] = [lambda: written]
    assert case.tried()[name].startswith("differs by")


def test_every_op_with_a_baseline_is_in_these_tests():
    def words(path):
        return {getattr(node, "arg", getattr(node, "value", None)) for node in ast.walk(ast.parse(path.read_text()))}

    paths = {op: Path(cases.load(op).__file__) for op in cases.benchmarks()}
    assert SHAPES.keys() == {op for op, path in paths.items() if "baselines" in words(path)}
