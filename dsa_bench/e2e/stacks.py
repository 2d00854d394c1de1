"""Stacks: some layers of each published model, at least one of every kind, with real sizes and random weights."""

import json
import math
import tempfile
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from dsa_layers.engine.fuse import fuse, prepare
from dsa_layers.engine.split import split
from dsa_layers.layers.linear import BlockFP8Linear
from dsa_layers.models.family import family, published_config, read_config
from dsa_layers.models.precision import Precision
from dsa_layers.models.protocols import CheckpointModel
from dsa_layers.parallel.ranks import ALONE, Ranks

# The quantization_config that an FP8 release adds to the configuration of the bf16 release.
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
# {name: (the pinned configuration's file, the fields that the stack changes)}
STACKS: dict[str, tuple[str, dict[str, Any]]] = {
    "V3.2": ("deepseek_v32_config.json", {"num_hidden_layers": 4, "first_k_dense_replace": 1}),
    "V4-Flash": (
        "deepseek_v4_flash_config.json",
        {"num_hidden_layers": 5, "num_hash_layers": 1, "compress_ratios": [0, 4, 128, 4, 128]},
    ),
    "GLM-5": (
        "glm_5_config.json",
        {"num_hidden_layers": 4, "first_k_dense_replace": 1, "quantization_config": FP8},
    ),
}
# The stacks for prompts of a million tokens (`million.py`). In GLM-5.2's stack one layer selects keys and three layers
# reuse its selection; in the published model 21 of 78 layers select.
LONG_STACKS: dict[str, tuple[str, dict[str, Any]]] = {
    "V4-Flash": STACKS["V4-Flash"],
    "GLM-5.2": (
        "glm_5_2_config.json",
        {
            "num_hidden_layers": 4,
            "first_k_dense_replace": 1,
            "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
            "indexer_types": ["full", "shared", "shared", "shared"],
            "index_skip_topk_offset": 1,
            "quantization_config": FP8,
        },
    ),
}


def skeleton(name: str, *, widen_experts: bool = False, drafter: bool = False, **changes: Any) -> CheckpointModel:
    """Make a stack's model on the meta device, in the published precision.

    widen_experts: FP4 experts become FP8, as in `load_model`. drafter: the model has a drafter. changes: fields that
    replace the stack's.
    """
    file, fields = (LONG_STACKS | STACKS)[name]
    return model_of(published_config(file) | fields | changes, widen_experts, drafter)


def model_of(fields: dict[str, Any], widen_experts: bool = False, drafter: bool = False) -> CheckpointModel:
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(fields))
        config = read_config(directory)
    with torch.device("meta"):
        fp4 = config.quantization.expert_dtype == "fp4" and not widen_experts
        of_family = family(config.model_type)
        model = of_family.model(config, replace(Precision.of(config), fp4_experts=fp4))
        if drafter:
            model.drafter = of_family.drafter(model)
        return fuse(model)


def linear_shapes(model: torch.nn.Module) -> list[tuple[int, int]]:
    """Return the sorted (columns, channels) of the FP8 linear layers' products. One product can join several layers."""
    joint = [layers for m in model.modules() if hasattr(m, "joint_layers") and (layers := m.joint_layers())]
    every = {layer for layer in model.modules() if isinstance(layer, BlockFP8Linear)}
    single = every.difference(*joint)
    products = [[layer] for layer in single] + [layers for layers in joint if every.issuperset(layers)]
    return sorted({(sum(len(layer.weight) for layer in layers), layers[0].weight.shape[1]) for layers in products})


def published_layers(name: str) -> int:
    return published_config(STACKS[name][0])["num_hidden_layers"]


def with_layers(name: str, layers: int) -> dict[str, Any]:
    """Return the configuration fields that give a stack `layers` layers.

    The kinds of layers have the published model's proportions, with at least one layer of each kind. With as many
    layers as the published model, the fields are the published ones.
    """
    config = published_config(STACKS[name][0])

    def scaled(published: int) -> int:
        return max(1, round(published * layers / config["num_hidden_layers"]))

    if "compress_ratios" not in config:
        return {"num_hidden_layers": layers, "first_k_dense_replace": scaled(config["first_k_dense_replace"])}
    ratios = config["compress_ratios"][: config["num_hidden_layers"]]
    windows, others = ([ratio for ratio in ratios if (ratio == 0) is window] for window in (True, False))
    chosen = windows[: scaled(len(windows))]
    return {
        "num_hidden_layers": layers,
        "num_hash_layers": scaled(config["num_hash_layers"]),
        "compress_ratios": chosen + others[: layers - len(chosen)],
    }


@torch.no_grad()
def stack(
    name: str,
    device: torch.device | str = "cuda",
    *,
    ranks: Ranks = ALONE,
    widen_experts: bool = False,
    drafter: bool = False,
    **changes: Any,
) -> CheckpointModel:
    """Make a stack's model with random weights on `device`; with several ranks, the part of this rank.

    Tensors that are not split are equal on all ranks. Parts of split tensors differ between ranks.
    """
    model = skeleton(name, widen_experts=widen_experts, drafter=drafter, **changes)
    cuts = split(model, ranks, blocks=True)
    model.to_empty(device=device)
    generator = torch.Generator(device)
    for key, parameter in model.named_parameters():
        cut = cuts.get(key)
        generator.manual_seed(zlib.crc32(f"{key} {ranks.rank if cut else 'whole'}".encode()))
        fill(key, parameter.data, (cut.whole if cut else parameter.shape)[-1], model.config, generator)
    model.init_buffers(device)
    prepare(model)
    return model.eval()


def fill(name: str, values: torch.Tensor, columns: int, config: Any, generator: torch.Generator) -> None:
    """Fill a parameter with random values of unit gain, so that activations stay of order 1 from layer to layer.

    columns: the columns of the tensor before it was split; `values` may be a part of it.
    """
    if values.dtype == torch.float8_e4m3fn:
        # torch has no random FP8. These bytes have a random sign, a magnitude from 1/4 to below 1, and any mantissa.
        bits = values.view(torch.uint8).random_(0, 32, generator=generator)
        bits.add_(bits & 0x10, alpha=7).add_(0x28)
    elif values.dtype == torch.int8:  # two e2m1 codes per byte; every code is a finite number
        values.view(torch.uint8).random_(0, 256, generator=generator)
    elif values.dtype == torch.float8_e8m0fnu:
        values.view(torch.uint8).fill_(127 + _fp4_exponent(32 * columns))
    elif name.endswith("_block_scale"):
        # FP4 scales are 2^6 times their block's scale. So an FP4 weight divided by the block's scale is an e4m3 number,
        # of at most 6 * 2^6 = 384.
        values.fill_(2.0 ** (_fp4_exponent(128 * columns) - 6))
    elif name.endswith("_scale_inv"):
        values.fill_(2.0 ** round(math.log2((128 * columns) ** -0.5 / 0.55)))
    elif name.endswith("tid2eid"):
        scores = torch.rand(len(values), config.n_routed_experts, generator=generator, device=values.device)
        values.copy_(scores.argsort(-1)[:, : values.shape[1]])
    elif values.dim() >= 2:
        values.normal_(std=1.0 if "embed" in name else columns**-0.5, generator=generator)
    else:
        values.fill_(1.0 if "norm" in name and name.endswith("weight") else 0.0)


def _fp4_exponent(columns: int) -> int:
    """Return the exponent of the scale of random FP4 weights, whose codes have a root mean square of 2.9."""
    return round(math.log2(columns**-0.5 / 2.9))
