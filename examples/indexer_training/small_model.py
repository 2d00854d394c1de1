"""The model: DeepSeek-V3.2's architecture with the latents, rope and cache layout of the published one, few layers and
narrow ones, and its multi-token-prediction layer."""

import json
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from dsa_layers import Precision, read_config, save_model
from dsa_layers.io.directory import SINGLE_NAME
from dsa_layers.io.loading import unfilled_model
from dsa_layers.models.deepseek_v32 import DeepseekV32Drafter, DeepseekV32ForCausalLM
from dsa_layers.models.family import published_config

from .vocabulary import BEGIN, BYTES

# With 512 tokens 3.94 MB: 3.1 in FP8 blocks; embedding, head, and the projection in front of the drafter's block are
# 0.79 in BF16. What kernels depend on is the published model's: latents of 512, rope of 64 channels, values of 128.
FIELDS = {
    "bos_token_id": BEGIN,
    "eos_token_id": BEGIN,
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 1,
    "intermediate_size": 256,
    "moe_intermediate_size": 128,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
    "num_attention_heads": 2,
    "q_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "index_topk": 128,
    "index_n_heads": 8,
    "index_head_dim": 128,
    "max_position_embeddings": 2048,
    "num_nextn_predict_layers": 1,
}
# Of the published configuration: YaRN is for contexts that this model never sees.
_LEFT_OUT = ("rope_scaling", "transformers_version")
# Of the published layer's tensors: copies of the model's embedding and head, which loading does not read.
_COPIES = ("embed_tokens.", "shared_head.head.")


def fields(changes: dict[str, object], *, quantized: bool) -> dict[str, object]:
    """Those of config.json: FIELDS and `changes`, which have the `vocab_size`, over the published ones."""
    merged = published_config("deepseek_v32_config.json") | FIELDS | changes
    merged["num_key_value_heads"] = merged["num_attention_heads"]
    left_out = _LEFT_OUT if quantized else (*_LEFT_OUT, "quantization_config")
    return {name: value for name, value in merged.items() if name not in left_out}


# The example sets these itself, or needs them as they are.
_FIXED = ("max_position_embeddings", "num_key_value_heads", "num_nextn_predict_layers", "quantization_config")
_FIXED += ("rope_scaling", "vocab_size")


def check(changes: dict[str, object], length: int) -> None:
    """Raises ValueError for fields with which training would fail later. length: tokens of a sequence."""
    for name in _FIXED:
        if name in changes:
            raise ValueError(f"{name}: is set by the example; other fields of config.json are accepted")
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "config.json"
        sizes = {"vocab_size": 2 * BYTES, "max_position_embeddings": length}
        path.write_text(json.dumps(fields(changes | sizes, quantized=True)))
        config = read_config(directory)
        unfilled_model(config, Precision.of(config))
    if config.index_topk > length:
        raise ValueError(f"index_topk: must be at most the {length} tokens of a sequence, got {config.index_topk}")


def build(changes: dict[str, object], dtype: torch.dtype) -> DeepseekV32ForCausalLM:
    """With random weights, and a drafter; blocks add nothing to the residual stream before the first step."""
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(fields(changes, quantized=False)))
        config = read_config(directory)
    model = DeepseekV32ForCausalLM(config, Precision(dtype, False, False, "model"))
    model.drafter = DeepseekV32Drafter(model)
    for name, parameter in model.named_parameters():
        if "o_proj" in name or "down_proj" in name:
            nn.init.zeros_(parameter)
    return model


def save(model: DeepseekV32ForCausalLM, directory: Path, config: dict[str, object]) -> None:
    """The checkpoint in the published format, without the copies of embedding and head: they would be a seventh."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / SINGLE_NAME).unlink(missing_ok=True)  # of the stage before
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_model(model, directory, like=directory, progress=False)
    prefix = f"model.layers.{model.config.num_hidden_layers}."
    copies = tuple(prefix + name for name in _COPIES)
    tensors = {name: x for name, x in load_file(directory / SINGLE_NAME).items() if not name.startswith(copies)}
    save_file(tensors, directory / SINGLE_NAME, metadata={"format": "pt"})
