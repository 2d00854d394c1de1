"""The model: DeepSeek-V3.2's architecture with the latents, rope and cache layout of the published one, few layers and
narrow ones, over bytes."""

import json
import tempfile
from pathlib import Path

import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers
from torch import nn

from dsa_layers.families.config import read_config
from dsa_layers.families.deepseek_v32.model import DeepseekV32ForCausalLM
from dsa_layers.families.precision import Precision
from dsa_layers.families.published import published_config

from .corpus import BEGIN, VOCAB

# 3.7M parameters in FP8 blocks and 0.14M beside them. What kernels depend on is the published model's: latents of 512,
# rope of 64 channels, values of 128.
FIELDS = {
    "vocab_size": VOCAB,
    "bos_token_id": BEGIN,
    "eos_token_id": BEGIN,
    "hidden_size": 256,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 2,
    "intermediate_size": 256,
    "moe_intermediate_size": 128,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "index_topk": 128,
    "index_n_heads": 8,
    "index_head_dim": 128,
    "max_position_embeddings": 2048,
    "num_nextn_predict_layers": 0,
}
# Of the published configuration: YaRN is for contexts that this model never sees.
_LEFT_OUT = ("rope_scaling", "transformers_version")
_BOS = "<｜begin▁of▁file｜>"


def fields(changes: dict[str, object], *, quantized: bool) -> dict[str, object]:
    """Those of config.json: FIELDS and `changes` over the published ones."""
    published = published_config("deepseek_v32_config.json")
    left_out = _LEFT_OUT if quantized else (*_LEFT_OUT, "quantization_config")
    return {name: value for name, value in (published | FIELDS | changes).items() if name not in left_out}


def build(changes: dict[str, object], dtype: torch.dtype) -> DeepseekV32ForCausalLM:
    """With random weights; its blocks add nothing to the residual stream before the first step."""
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(fields(changes, quantized=False)))
        config = read_config(directory)
    model = DeepseekV32ForCausalLM(config, Precision(dtype, False, False, "model"))
    for name, parameter in model.named_parameters():
        if "o_proj" in name or "down_proj" in name:
            nn.init.zeros_(parameter)
    return model


def byte_tokenizer() -> tokenizers.Tokenizer:
    """A token is a byte and its id the byte's value; BEGIN is special."""
    tokenizer = tokenizers.Tokenizer(models.BPE({_letter(b): b for b in range(256)}, []))
    tokenizer.add_special_tokens([_BOS])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def tokenizer_config(max_length: int) -> dict[str, object]:
    """The fields of tokenizer_config.json."""
    return {
        "add_bos_token": True,
        "add_eos_token": False,
        "bos_token": _BOS,
        "clean_up_tokenization_spaces": False,
        "eos_token": _BOS,
        "model_max_length": max_length,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }


def _letter(byte: int) -> str:
    """The letter that byte-level tokenizers write for a byte: itself if it is printable, else one past 255."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    if byte in printable:
        return chr(byte)
    return chr(256 + sum(1 for b in range(byte) if b not in printable))
