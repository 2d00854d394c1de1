"""The benchmarks of GEMMs measure the shapes of the published models."""

import pytest

from dsa_bench.gemm import fp8_fp4_gemm_nt, fp8_gemm_nt, grouped_fp8_gemm_swiglu, linear_layers
from dsa_bench.gemm._published_layers import MODELS, linear_shapes
from dsa_layers.models.family import published_config

DENSE = [shape[:3] for shape in fp8_gemm_nt.SHAPES if shape[3] is None]


def test_layers_are_those_of_the_configurations():
    hidden, heads, latent = 7168, 128, 512
    attention = {(1536, hidden), (heads * 192, 1536), (latent + 64, hidden), (heads * 256, latent), (hidden, 16384)}
    indexer, mlp = {(64 * 128, 1536), (128, hidden)}, {(18432, hidden), (hidden, 18432), (2048, hidden), (hidden, 2048)}
    assert {*linear_shapes("V3.2")} == attention | indexer | mlp
    assert (28672, 512) in linear_shapes("GLM-5") and len(linear_shapes("GLM-5")) == 10
    # wo_a (8192, 4096) is left out, because it is a grouped product: 8 matrices of 1024 rows.
    flash = linear_shapes("V4-Flash")
    assert (4096, 8192) in flash and (8192, 4096) not in flash and len(flash) == 7
    assert (65536, 1536) in linear_shapes("V4-Pro")


def test_every_layer_is_measured_at_every_number_of_rows():
    matrices = {shape for model in MODELS for shape in linear_shapes(model)}
    assert {*linear_layers.SHAPES} == {(rows, *shape) for rows in linear_layers.ROWS for shape in matrices}
    assert len(linear_layers.SHAPES) == len({*linear_layers.SHAPES})
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        linear_layers.nothing  # noqa: B018


def test_the_receipt_has_products_of_every_model_and_every_number_of_rows():
    assert {*DENSE} <= {*linear_layers.SHAPES, *((rows, *fp8_gemm_nt.FUSED) for rows in linear_layers.ROWS)}
    assert {rows for rows, *_ in DENSE} == {*linear_layers.ROWS} and len(DENSE) == len({*DENSE}) <= 45
    for model in MODELS:
        shapes = linear_shapes(model)
        measured = [rows for rows, *shape in DENSE if tuple(shape) in shapes]
        assert min(measured) <= 2 and max(measured) >= 4096, model


@pytest.mark.parametrize("model", [name for name in MODELS if name != "GLM-5"])  # GLM-5 has V3.2's experts
def test_experts_are_those_of_the_configurations(model):
    config = published_config(MODELS[model])
    hidden, inner = config["hidden_size"], config["moe_intermediate_size"]
    experts = config["n_routed_experts"], config["num_experts_per_tok"]
    products = {(2 * inner, hidden, *experts), (hidden, inner, *experts)}
    assert products <= {shape[1:] for shape in fp8_gemm_nt.SHAPES if shape[3] is not None}
    assert (inner, hidden, *experts, config.get("swiglu_limit")) in {s[1:] for s in grouped_fp8_gemm_swiglu.SHAPES}
    assert config.get("expert_dtype") != "fp4" or products <= {shape[1:] for shape in fp8_fp4_gemm_nt.SHAPES}


def test_the_summary_is_by_the_number_of_rows():
    rows = [
        {"shape": f"{count} x 256 x 128", "ratio": ratio}
        for count, ratio in ((1, 0.5), (1, 1.0), (1, 1.5), (16, 2.0), (4, None), (128, 0.99))
    ]
    head, *lines = (line.split() for line in linear_layers.summary(rows).splitlines())
    assert head[:2] == ["rows", "shapes"]
    assert lines == [
        ["1", "3", "0.50", "1.00", "67%"],
        ["16", "1", "2.00", "2.00", "100%"],
        ["128", "1", "0.99", "0.99", "0%"],
        ["all", "5", "0.50", "1.00", "60%"],
    ]
