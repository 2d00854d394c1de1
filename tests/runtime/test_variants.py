"""The variants that ops ask for, and those that differ from them in the tile."""

import importlib

import torch

import dsa
from dsa.kernels.gemm import per_token_cast_to_fp8_sm90 as casts
from dsa.runtime.asked_variants import asked_variants
from dsa.runtime.op import OPS
from dsa.runtime.variants import TILES, Variant, with_all_tiles
from tests.kernels.variants import all_compile_functions


def test_a_variant_brings_the_variants_that_differ_in_the_tile():
    """Arguments with a default may be missing, as in the calls of the ops."""
    name, given = "compile_per_token_cast_to_fp8", ("bfloat16", True, False)
    tiles = {a[3] for f, a in casts.shipped_variants() if f.__name__ == name and a[:3] == given}
    of_tiles = {Variant(casts.__name__, name, (*given, tile)) for tile in tiles}
    assert with_all_tiles([min(of_tiles, key=repr)]) == of_tiles and len(tiles) > 1
    other = Variant("dsa.kernels.moe.sort_by_expert_sm90", "compile_sort_by_expert", ("int64",))
    assert with_all_tiles([other]) == {other}


def test_every_kernel_in_tiles_has_several_tiles():
    functions = {function.__name__: function for function in all_compile_functions()}
    for name, place in TILES.items():
        module = importlib.import_module(functions[name].__module__)
        assert len({a[place] for f, a in module.shipped_variants() if f.__name__ == name}) > 1, name


def test_asked_variants_leaves_no_traces():
    """After the block, ops run their references again, and no later call finds a kernel that does nothing."""
    x, weight = torch.zeros(4, 512, dtype=torch.bfloat16, device="meta"), torch.ones(512, device="meta")
    for _ in range(2):
        with asked_variants("sm_90") as asked:
            dsa.rms_norm(x, weight, 1e-6)
        assert [v.function for v in asked] == ["compile_rms_norm"]
    normed = dsa.rms_norm(torch.randn(4, 512), None, 0.0)
    assert torch.allclose(normed.square().mean(-1), torch.ones(4))
    assert not any(op.known.steps or op.known._times for op in OPS.values())
    assert not x.is_cuda
