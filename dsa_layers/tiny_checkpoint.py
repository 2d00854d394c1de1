"""A small DeepSeek-V3.2 checkpoint in the published format, with random weights: for demonstrations and tests.

The dimensions that kernels care about are the real ones (latent 512, rope 64, nope and value 128, indexer 64 x 128);
the number of layers, heads and experts and the widths are small. Its text is noise, but everything between
`config.json` and a decoded token is as in the published checkpoint: names, dtypes, FP8 blocks, shards, tokenizer.
"""

import json
import math
import tempfile
from os import PathLike
from pathlib import Path
from typing import Any

import tokenizers
import torch
from safetensors.torch import save_file
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from dsa import per_block_cast_to_fp8
from dsa_layers.checkpoint import INDEX_NAME, SCALE_SUFFIX
from dsa_layers.config import read_config
from vendored.deepseek_v32_manifest import deepseek_v32_tensor_manifest

_BOS, _EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
_USER, _ASSISTANT = "<｜User｜>", "<｜Assistant｜>"

_CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'system' %}{{ message['content'] }}"
    "{% elif message['role'] == 'user' %}{{ '" + _USER + "' + message['content'] }}"
    "{% elif message['role'] == 'assistant' %}{{ '" + _ASSISTANT + "' + message['content'] + eos_token }}"
    "{% else %}{{ raise_exception('role ' + message['role'] + ' is not supported') }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '" + _ASSISTANT + "' }}{% endif %}"
)

_VOCAB_SIZE = 2048
_SHARD_BYTES = 12 * 2**20
_WRITER = "dsa tiny checkpoint"
_TORCH_DTYPE = {"BF16": torch.bfloat16, "F32": torch.float32}
_ITEM_SIZE = {"F8_E4M3": 1, "BF16": 2, "F32": 4}

_CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV32ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "ep_size": 1,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 512,
    "index_head_dim": 128,
    "index_n_heads": 64,
    "index_topk": 128,
    "initializer_range": 0.02,
    "intermediate_size": 1024,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v32",
    "moe_intermediate_size": 256,
    "moe_layer_freq": 1,
    "n_group": 2,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 4,
    "num_key_value_heads": 4,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 256,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "v_head_dim": 128,
    "vocab_size": _VOCAB_SIZE,
}

_QUANTIZATION_CONFIG = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "scale_fmt": "ue8m0",
    "weight_block_size": [128, 128],
}

_GENERATION_CONFIG = {"bos_token_id": 0, "eos_token_id": 1, "do_sample": True, "temperature": 1.0, "top_p": 0.95}

_METADATA_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", INDEX_NAME)


def write_tiny_checkpoint(directory: str | PathLike[str], *, seed: int = 0, quantized: bool = True) -> None:
    """Writes the checkpoint, about 45 MB (80 MB with quantized=False), into `directory`, which is made if need be.

    quantized: FP8 blocks with scales, as published; otherwise the weights are BF16. The random weights follow from
    `seed` alone, whether quantised or not; the tokenizer is trained on this repository's text, or on this package's
    source where it is installed without the repository.
    A tiny checkpoint that is already there is replaced. Raises FileExistsError if `directory` holds anything else.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    for path in _previous_files(directory):
        path.unlink()

    fields = {**_CONFIG, "quantization_config": _QUANTIZATION_CONFIG} if quantized else _CONFIG
    manifest = _manifest(fields)
    shards = _shards(manifest)
    size = sum(_size(*entry) for entry in manifest.values())
    weight_map = {name: file for file, names in shards.items() for name in names}
    # The index carries our mark, so it comes first: what an interrupted run leaves can be replaced by the next.
    # config.json comes last: where it is, the checkpoint is complete.
    _write_json(directory / INDEX_NAME, {"metadata": {"total_size": size, "writer": _WRITER}, "weight_map": weight_map})
    _train_tokenizer().save(str(directory / "tokenizer.json"))
    _write_json(directory / "tokenizer_config.json", _tokenizer_config())
    _write_json(directory / "generation_config.json", _GENERATION_CONFIG)
    generator = torch.Generator().manual_seed(seed)
    for file, names in shards.items():
        save_file(_random_tensors(names, manifest, generator), directory / file, metadata={"format": "pt"})
    _write_json(directory / "config.json", fields)


def _previous_files(directory: Path) -> list[Path]:
    """The files of a tiny checkpoint in `directory`, all of which may go; none if the directory is empty."""
    present = sorted(directory.iterdir())
    if not present:
        return []
    try:
        index = json.loads((directory / INDEX_NAME).read_bytes())
        ours = {*_METADATA_FILES, *index["weight_map"].values()} if index["metadata"]["writer"] == _WRITER else set()
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        ours = set()
    others = [path.name for path in present if path.name not in ours]
    if others:
        raise FileExistsError(
            f"{directory}: holds {others[0]!r}, which is not part of a tiny checkpoint; accepted: a new or empty "
            "directory, or one with nothing but a tiny checkpoint in it"
        )
    return present


def _manifest(fields: dict[str, Any]) -> dict[str, tuple[tuple[int, ...], str]]:
    # Through a file, so that what is written is what was parsed.
    with tempfile.TemporaryDirectory() as scratch:
        _write_json(Path(scratch) / "config.json", fields)
        return deepseek_v32_tensor_manifest(read_config(scratch))


def _shards(manifest: dict[str, tuple[tuple[int, ...], str]]) -> dict[str, list[str]]:
    """File name -> the tensors in it: consecutive ones, a weight always together with its scale."""
    groups: list[list[str]] = []
    filled = _SHARD_BYTES
    for name, entry in manifest.items():
        if filled >= _SHARD_BYTES and not name.endswith(SCALE_SUFFIX):
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += _size(*entry)
    return {f"model-{i:05d}-of-{len(groups):06d}.safetensors": group for i, group in enumerate(groups, start=1)}


def _size(shape: tuple[int, ...], dtype: str) -> int:
    return math.prod(shape) * _ITEM_SIZE[dtype]


def _random_tensors(
    names: list[str], manifest: dict[str, tuple[tuple[int, ...], str]], generator: torch.Generator
) -> dict[str, torch.Tensor]:
    tensors = {}
    for name in names:
        shape, dtype = manifest[name]
        if name.endswith(SCALE_SUFFIX):
            continue  # made with its weight
        values = _random_values(name, shape, generator)
        if dtype == "F8_E4M3":
            tensors[name], tensors[name + SCALE_SUFFIX] = per_block_cast_to_fp8(values)
        else:
            tensors[name] = values.to(_TORCH_DTYPE[dtype])
    return tensors


def _random_values(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Values at which every part has an effect: activations of order 1, logits that spread, norms that are not 1."""
    values = torch.randn(shape, generator=generator)
    if name.endswith(("norm.weight", "layernorm.weight")):
        return 1 + 0.1 * values
    if name.endswith(("k_norm.bias", "e_score_correction_bias")):
        return 0.1 * values
    if name.endswith("embed_tokens.weight"):
        return values
    # Of unit gain, except the heads: their rows see a normalised input, and twice the gain sharpens the softmax.
    gain = 2 if name.endswith("head.weight") else 1
    return values * gain * shape[1] ** -0.5


def _tokenizer_config() -> dict[str, Any]:
    def token(content: str) -> dict[str, Any]:
        flags = {"lstrip": False, "normalized": True, "rstrip": False, "single_word": False}
        return {"__type": "AddedToken", "content": content, **flags}

    return {
        "add_bos_token": True,
        "add_eos_token": False,
        "bos_token": token(_BOS),
        "clean_up_tokenization_spaces": False,
        "eos_token": token(_EOS),
        "model_max_length": _CONFIG["max_position_embeddings"],
        "pad_token": token(_EOS),
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": None,
        "chat_template": _CHAT_TEMPLATE,
    }


def _train_tokenizer() -> tokenizers.Tokenizer:
    """A byte-level BPE tokenizer, as DeepSeek's is: any text can be written in it. BOS is 0 and EOS is 1."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCAB_SIZE,
        special_tokens=[_BOS, _EOS, _USER, _ASSISTANT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([path.read_text(encoding="utf-8") for path in _corpus()], trainer)
    return tokenizer


def _corpus() -> list[Path]:
    package = Path(__file__).resolve().parent
    root = package.parent
    if not (root / "pyproject.toml").exists():
        return sorted(package.rglob("*.py"))
    sources = ("dsa", "dsa_layers", "reference", "vendored")
    return sorted(
        [
            *root.glob("*.md"),
            *(root / "docs").rglob("*.md"),
            *(path for s in sources for path in (root / s).rglob("*.py")),
        ]
    )


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
