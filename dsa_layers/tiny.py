"""Write a small checkpoint of a model family, with random weights, for demonstrations and tests.

If kernels support only some sizes of a dimension, the dimension has its published size. The others are small. The
checkpoint has the files of a published one: config.json, tokenizer, and shards of tensors with the published names.
"""

import hashlib
import re
from os import PathLike
from pathlib import Path
from typing import Any

import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from dsa.runtime.checks import check_flag, integer, path_of
from dsa_layers.config.fields import Fields
from dsa_layers.io.chat_template import FORMATS
from dsa_layers.io.published import copied_from, published_manifest, scales_of
from dsa_layers.io.save import steps_of, to_json, write_shards
from dsa_layers.io.tensors import KINDS, TensorInfo
from dsa_layers.io.weights import Part, unpacked
from dsa_layers.models.family import config_of, family
from dsa_layers.models.registry import FAMILIES

_SHARD_BYTES = 12 * 2**20  # small, so that a tiny checkpoint has several shards, as published checkpoints have

_GENERATION_CONFIG = {"bos_token_id": 0, "eos_token_id": 1, "do_sample": True, "temperature": 1.0, "top_p": 0.95}

_BOS, _EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
_USER, _ASSISTANT = "<｜User｜>", "<｜Assistant｜>"

_CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'system' %}{{ message['content'] }}"
    "{% elif message['role'] == 'user' %}{{ '" + _USER + "' + message['content'] }}"
    "{% elif message['role'] == 'assistant' %}{{ '" + _ASSISTANT + "' + message['content'] + eos_token }}"
    "{% else %}{{ raise_exception('role ' + message['role'] + ' is not supported') }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '" + _ASSISTANT + "' }}"
    "{% if enable_thinking is defined %}{{ '<think>' if enable_thinking else '</think>' }}{% endif %}{% endif %}"
)


def write_tiny_checkpoint(
    directory: str | PathLike[str], *, model: str = "deepseek_v32", seed: int = 0, quantized: bool = True
) -> None:
    """Write a small random checkpoint, about 24 to 44 MB (44 to 79 MB with quantized=False), into `directory`. Create
    `directory` if it does not exist.

    model: the `model_type`, a key of `dsa_layers.models.registry.FAMILIES`.
    seed: the seed of the random weights. The weights before quantisation do not depend on `quantized`.
    quantized: whether projections and experts are quantised: to FP8 with a scale per 128 x 128 block, except
    deepseek_v4's experts, which are FP4. False: these weights are BF16.
    The tokenizer is trained on the source code of this package.
    Raises ValueError for another `model`; TypeError or ValueError, which names the argument, for another wrong
    argument; FileExistsError if `directory` exists and is not empty.
    """
    if model not in FAMILIES:
        raise ValueError(f"model: must be one of {', '.join(map(repr, FAMILIES))}, got {model!r}")
    directory = path_of("directory", directory)
    integer("seed", seed, at_least=0, at_most=2**63 - 1)
    check_flag("quantized", quantized)
    if directory.exists() and any(directory.iterdir()):
        raise FileExistsError(f"{directory}: must be new or empty for a tiny checkpoint")

    tiny = family(model).tiny
    fields = tiny.fields(quantized=quantized)
    config = config_of(Fields(fields, directory / "config.json"))
    directory.mkdir(parents=True, exist_ok=True)
    train_tokenizer(config.vocab_size).save(str(directory / "tokenizer.json"))
    fields_of_tokenizer = tokenizer_config(model, config.max_position_embeddings)
    (directory / "tokenizer_config.json").write_text(to_json(fields_of_tokenizer), encoding="utf-8")
    (directory / "generation_config.json").write_text(to_json(_GENERATION_CONFIG), encoding="utf-8")

    manifest = published_manifest(config)
    weights = manifest.keys() - scales_of(manifest).values()
    parts = {name: Part(name, name, (), _before_quantisation(manifest[name])) for name in weights}
    steps = steps_of(manifest, parts, [], use_ue8m0=config.use_ue8m0, source=directory)

    def make(name: str) -> dict[str, torch.Tensor]:
        digest = hashlib.sha256(f"{seed} {copied_from(name) or name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8]))
        return steps[name].make(random_values(name, parts[name].info.shape, generator, config.n_routed_experts))

    write_shards(directory, manifest, make, fields, like=directory, shard_bytes=_SHARD_BYTES, progress=False)


def _before_quantisation(info: TensorInfo) -> TensorInfo:
    """Return the shape and dtype of a tensor's values before quantisation. info: the tensor's description."""
    return info if info.dtype not in KINDS else TensorInfo(unpacked(info.shape, KINDS[info.dtype]), "F32")


def random_values(name: str, shape: tuple[int, ...], generator: torch.Generator, experts: int) -> torch.Tensor:
    """Return random values for the tensor `name`, such that every part of the model affects the result.

    experts: the number of routed experts, among which the table of a hash-routed layer (tid2eid) chooses
    """
    if name.endswith("tid2eid"):
        return torch.rand(shape[0], experts, generator=generator, device="cpu").argsort(-1)[:, : shape[1]].contiguous()
    values = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
    if name.endswith(("norm.weight", "ssmax_scaling.b")) or re.search(r"hc_(\w+_)?scale$", name):
        return 1 + 0.1 * values
    if name.endswith(("attn_sink", "learnable_sink_param", "ape", "_base")):
        return 0.5 * values
    if len(shape) == 1:  # biases, and factors for which 0 is neutral
        return 0.1 * values
    if name.endswith(("embed_tokens.weight", "embed.weight", "tok_embeddings.weight")):
        return values
    # Matrices have unit gain, except the language model head, whose gain of 2 makes the logits differ more.
    gain = 2 if name.endswith(("head.weight", "output.weight")) else 1
    return values * gain * shape[1] ** -0.5


def tokenizer_config(model_type: str, max_length: int) -> dict[str, Any]:
    """Return the fields of tokenizer_config.json. max_length: the model's context in tokens. Models in `FORMATS`
    (io/chat_template.py) get no chat template, as in their published releases."""

    return {
        "add_bos_token": True,
        "add_eos_token": False,
        "bos_token": _BOS,
        "clean_up_tokenization_spaces": False,
        "eos_token": _EOS,
        "model_max_length": max_length,
        "pad_token": _EOS,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": None,
        **({} if model_type in FORMATS else {"chat_template": _CHAT_TEMPLATE}),
    }


def train_tokenizer(vocab_size: int) -> tokenizers.Tokenizer:
    """Train a byte-level BPE tokenizer, with BOS as token 0 and EOS as token 1."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[_BOS, _EOS, _USER, _ASSISTANT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    corpus = sorted(Path(__file__).parent.rglob("*.py"))
    tokenizer.train_from_iterator([path.read_text(encoding="utf-8") for path in corpus], trainer)
    return tokenizer
