"""Writes a tiny checkpoint: its files, and the order in which they come."""

import json
import tempfile
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from dsa_layers.arguments import flag, integer, path_of
from dsa_layers.families.config import read_config
from dsa_layers.families.model import ModelConfig
from dsa_layers.families.registry import family, model_types
from dsa_layers.io.directory import INDEX_NAME
from dsa_layers.io.published_format import ORIGINALS, copied_from
from dsa_layers.io.shards import PART, Shards, save_tensors, write_json
from dsa_layers.output_files import naming
from dsa_layers.tiny.tokenizer import tokenizer_config, train_tokenizer
from dsa_layers.tiny.values import random_tensors

_SHARD_BYTES = 12 * 2**20
_WRITER = "dsa tiny checkpoint"

_GENERATION_CONFIG = {"bos_token_id": 0, "eos_token_id": 1, "do_sample": True, "temperature": 1.0, "top_p": 0.95}

_METADATA_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", INDEX_NAME)


def write_tiny_checkpoint(
    directory: str | PathLike[str], *, model: str = "deepseek_v32", seed: int = 0, quantized: bool = True
) -> None:
    """Writes the checkpoint, about 45 MB (80 MB with quantized=False), into `directory`, which is made if need be.

    model: its `model_type`, one of `registry.model_types()`.
    quantized: as published, FP8 blocks with scales, and the experts of deepseek_v4 in FP4; otherwise these weights are
    BF16. The random weights of a model follow from `seed`, whether quantised or not; the tokenizer is trained on this
    repository's text, or on this package's source where it is installed without the repository.
    A tiny checkpoint that is already there is replaced. Raises ValueError for another `model`, TypeError or ValueError
    that names any other argument, FileExistsError if `directory` holds anything else.
    """
    if model not in model_types():
        raise ValueError(f"model: must be one of {', '.join(map(repr, model_types()))}, got {model!r}")
    directory = path_of("directory", directory)
    integer("seed", seed, at_least=0, at_most=2**63 - 1)
    flag("quantized", quantized)
    directory.mkdir(parents=True, exist_ok=True)
    for path in _previous_files(directory):
        path.unlink()

    tiny = family(model).tiny
    fields = tiny.fields(quantized=quantized)
    config = _parsed(fields)
    manifest = tiny.drawing_order(family(model).manifest(config))
    shards = Shards.of(manifest, _SHARD_BYTES)
    weight_map = {name: file for file, names in shards.files.items() for name in names}
    # The index carries our mark, so it comes first: what an interrupted run leaves can be replaced by the next.
    # config.json comes last: where it is, the checkpoint is complete.
    metadata = {"total_size": shards.total, "writer": _WRITER}
    write_json(directory / INDEX_NAME, {"metadata": metadata, "weight_map": weight_map})
    _write(directory / "tokenizer.json", train_tokenizer(config.vocab_size).to_str(pretty=True))
    write_json(directory / "tokenizer_config.json", tokenizer_config(model, config.max_position_embeddings))
    write_json(directory / "generation_config.json", _GENERATION_CONFIG)
    generator = torch.Generator().manual_seed(seed)
    use_ue8m0 = config.quantization is not None and config.quantization.scale_fmt == "ue8m0"
    originals: dict[str, torch.Tensor] = {}
    for file, names in shards.files.items():
        tensors = random_tensors(names, manifest, generator, experts=config.n_routed_experts, use_ue8m0=use_ue8m0)
        copies = {name: original for name in names if (original := copied_from(name)) is not None}
        originals |= {name: tensors[name] for name in ORIGINALS & tensors.keys()}
        tensors |= {name: originals[original].clone() for name, original in copies.items()}
        save_tensors(directory / file, tensors)
    write_json(directory / "config.json", fields)


def _previous_files(directory: Path) -> list[Path]:
    """The files of a tiny checkpoint in `directory`, all of which may go; none if the directory is empty."""
    present = sorted(directory.iterdir())
    if not present:
        return []
    try:
        index = json.loads((directory / INDEX_NAME).read_bytes())
        weights = set(index["weight_map"].values()) if index["metadata"]["writer"] == _WRITER else None
        ours = set() if weights is None else {*_METADATA_FILES, *weights, *(name + PART for name in weights)}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        ours = set()
    others = [path.name for path in present if path.name not in ours]
    if others:
        raise FileExistsError(
            f"{directory}: holds {others[0]!r}, which is not part of a tiny checkpoint; accepted: a new or empty "
            "directory, or one with nothing but a tiny checkpoint in it"
        )
    return present


def _parsed(fields: dict[str, Any]) -> ModelConfig:
    # Through a file, so that what is written is what was parsed.
    with tempfile.TemporaryDirectory() as scratch:
        write_json(Path(scratch) / "config.json", fields)
        return read_config(scratch)


def _write(path: Path, text: str) -> None:
    with naming(path):
        path.write_text(text, encoding="utf-8")
