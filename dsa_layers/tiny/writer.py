"""Writes a tiny checkpoint."""

import tempfile
from os import PathLike
from pathlib import Path

import torch

from dsa_layers.arguments import flag, integer, path_of
from dsa_layers.io.directory import INDEX_NAME
from dsa_layers.io.manifest import Manifest, published_manifest
from dsa_layers.io.published_format import ORIGINALS, as_published, copied_from, scales_of, shape_of_values, uses_ue8m0
from dsa_layers.io.shards import PART, files_made_from, split_into_files, write_json, write_shards
from dsa_layers.models.config_file import read_config
from dsa_layers.models.registry import FAMILIES, family
from dsa_layers.tiny.tokenizer import tokenizer_config, train_tokenizer
from dsa_layers.tiny.values import random_values

_SHARD_BYTES = 12 * 2**20
_MARK = "dsa tiny checkpoint"

_GENERATION_CONFIG = {"bos_token_id": 0, "eos_token_id": 1, "do_sample": True, "temperature": 1.0, "top_p": 0.95}

_METADATA_FILES = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", INDEX_NAME}


def write_tiny_checkpoint(
    directory: str | PathLike[str], *, model: str = "deepseek_v32", seed: int = 0, quantized: bool = True
) -> None:
    """Writes the checkpoint, about 45 MB (80 MB with quantized=False), into `directory`, which is made if need be.

    model: its `model_type`, one of `dsa_layers.models.registry.FAMILIES`.
    quantized: as published, FP8 blocks with scales, and the experts of deepseek_v4 in FP4; otherwise these weights are
    BF16. The random weights of a model follow from `seed`, whether quantised or not; the tokenizer is trained on this
    repository's text, or on this package's source where it is installed without the repository.
    A tiny checkpoint that is already there is replaced. Raises ValueError for another `model`, TypeError or ValueError
    that names any other argument, FileExistsError if `directory` holds anything else.
    """
    if model not in FAMILIES:
        raise ValueError(f"model: must be one of {', '.join(map(repr, FAMILIES))}, got {model!r}")
    directory = path_of("directory", directory)
    integer("seed", seed, at_least=0, at_most=2**63 - 1)
    flag("quantized", quantized)
    _remove_previous(directory)

    tiny = family(model).tiny
    fields = tiny.fields(quantized=quantized)
    with tempfile.TemporaryDirectory() as scratch:
        like = Path(scratch)
        write_json(like / "config.json", fields)
        config = read_config(like)
        train_tokenizer(config.vocab_size).save(str(like / "tokenizer.json"))
        write_json(like / "tokenizer_config.json", tokenizer_config(model, config.max_position_embeddings))
        write_json(like / "generation_config.json", _GENERATION_CONFIG)

        manifest = _drawing_order(published_manifest(config), tiny.order)
        scales, use_ue8m0 = scales_of(manifest), uses_ue8m0(config)
        generator = torch.Generator().manual_seed(seed)
        originals: dict[str, torch.Tensor] = {}

        def make(name: str) -> dict[str, torch.Tensor]:
            values = random_values(name, shape_of_values(name, manifest), generator, config.n_routed_experts)
            tensors = as_published(name, values, manifest, scales, use_ue8m0=use_ue8m0)
            if name in ORIGINALS:
                originals[name] = tensors[name]
            original = copied_from(name)
            return tensors if original is None else {name: originals[original].clone()}

        files = split_into_files(manifest, _SHARD_BYTES)
        write_shards(directory, manifest, files, make, fields, like=like, made_from=_MARK, progress=False)


def _drawing_order(manifest: Manifest, order: tuple[str, ...]) -> Manifest:
    """The manifest in the order in which one generator draws the values: another order changes every value."""
    if not order:
        return manifest

    def key(name: str) -> list[int]:
        return [int(part) if part.isdecimal() else order.index(part) for part in name.split(".")]

    return {name: manifest[name] for name in sorted(manifest, key=key)}


def _remove_previous(directory: Path) -> None:
    """Remove the files of a tiny checkpoint, whole or interrupted. Raises FileExistsError for any other file."""
    present = sorted(directory.iterdir()) if directory.exists() else []
    weights = files_made_from(directory, _MARK)
    ours = {*_METADATA_FILES, *weights, *(name + PART for name in weights)} if weights else set()
    others = [path.name for path in present if path.name not in ours]
    if others:
        raise FileExistsError(
            f"{directory}: holds {others[0]!r}, which is not part of a tiny checkpoint; accepted: a new or empty "
            "directory, or one with nothing but a tiny checkpoint in it"
        )
    for path in present:
        path.unlink()
