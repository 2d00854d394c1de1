"""A small DeepSeek-V4 checkpoint in the published layout, written from a random model, and what its weights are worth.

The quantisers and their inverses here follow the formats' definitions, not the library.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from dsa_layers.io.directory import SINGLE_NAME
from dsa_layers.io.published import published_manifest
from dsa_layers.models.deepseek_v4 import DeepseekV4ForCausalLM
from dsa_layers.models.family import VENDORED, read_config
from dsa_layers.models.precision import Precision
from tests.layers.models.listings import parts

SMALL = {
    "vocab_size": 256, "hidden_size": 256, "moe_intermediate_size": 128, "num_hidden_layers": 4,
    "num_attention_heads": 4, "head_dim": 512, "qk_rope_head_dim": 64, "q_lora_rank": 128, "o_groups": 2,
    "o_lora_rank": 128, "n_routed_experts": 6, "num_experts_per_tok": 2, "num_hash_layers": 1, "sliding_window": 16,
    "compress_ratios": [0, 4, 128, 4, 0], "index_n_heads": 32, "index_topk": 8, "swiglu_limit": 2.0,
    "max_position_embeddings": 4096,
}  # fmt: skip

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
TORCH_DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32, "I64": torch.int64}


def write_published(directory: Path, *, expert_dtype: str = "fp4", scale_fmt: str | None = "ue8m0"):
    """Writes the checkpoint; returns, by the model's names, what its tensors are worth, in fp32."""
    fields = json.loads((VENDORED / "deepseek_v4_flash_config.json").read_text()) | SMALL
    fields |= {"expert_dtype": expert_dtype}
    fields["quantization_config"] |= {"scale_fmt": scale_fmt}
    (directory / "config.json").write_text(json.dumps(fields))
    config = read_config(directory)
    torch.manual_seed(0)
    model = DeepseekV4ForCausalLM(config, Precision(torch.float32, False, False, "model"))
    randomise(model)
    state = parts(model)

    stored, worth = {}, {}
    for name, (shape, dtype, _) in published_manifest(config).items():
        if name.endswith(".scale"):
            continue  # made with its weight
        skipped = model.skips(name)
        ours = model.name_of(name)
        values = torch.zeros(shape) if skipped else state[ours]
        if dtype in ("I8", "F8_E4M3"):
            quantised = to_fp4(values) if dtype == "I8" else to_fp8(values, scale_fmt == "ue8m0")
            stored[name], stored[name.removesuffix("weight") + "scale"], value = quantised
        else:
            stored[name] = values.to(TORCH_DTYPES[dtype])
            value = stored[name].to(torch.int64 if dtype == "I64" else torch.float32)
        if not skipped:
            worth[ours] = value
    save_file(stored, directory / SINGLE_NAME)
    return worth


def randomise(model):
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            parameter.data.normal_(1.0, 0.1)
        elif name.endswith(("sink", "base", "scale", "ape", "bias")):
            parameter.data.normal_(0.0, 0.5)
        elif name.endswith("tid2eid"):
            parameter.data.copy_(torch.rand(parameter.shape[0], 6).argsort(-1)[:, :2])
        elif name.endswith(".fn"):
            parameter.data.normal_(0.0, 0.05)
        elif parameter.dim() > 1:
            parameter.data.normal_(0.0, 2 * parameter.shape[1] ** -0.5)


def powers_of_two_above(x):
    return torch.exp2(torch.ceil(torch.log2(x.clamp_min(2.0**-100))))


def to_fp8(w, power_of_two):
    """(e4m3, scale by 128 x 128 blocks, worth)"""
    rows, columns = torch.meshgrid(*(torch.arange(n) // 128 for n in w.shape), indexing="ij")
    scale = torch.zeros(int(rows.max()) + 1, int(columns.max()) + 1)
    scale.view(-1).scatter_reduce_(0, (rows * scale.shape[1] + columns).flatten(), w.abs().flatten(), "amax")
    scale = scale.clamp_min(1e-6) / 448
    if power_of_two:
        scale = powers_of_two_above(scale)
    q = (w / scale[rows, columns]).clamp(-448, 448).to(torch.float8_e4m3fn)
    return q, scale.to(torch.float8_e8m0fnu) if power_of_two else scale, q.float() * scale[rows, columns]


def to_fp4(w):
    """(packed e2m1, scale by 32 columns, worth)"""
    scale = powers_of_two_above(w.unflatten(1, (-1, 32)).abs().amax(-1) / 6)
    full = scale.repeat_interleave(32, 1)
    codes = ((w / full).abs()[..., None] - E2M1).abs().argmin(-1)
    worth = E2M1[codes] * full * torch.where(w < 0, -1.0, 1.0)
    codes = (codes | (w < 0) * 8).to(torch.uint8)
    packed = (codes[:, 0::2] | (codes[:, 1::2] << 4)).view(torch.int8)
    return packed, scale.to(torch.float8_e8m0fnu), worth
