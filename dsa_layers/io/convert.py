"""A checkpoint with weights in another dtype, from its files to new ones."""

import hashlib
from os import PathLike

import torch

from dsa import dequantize_per_block, widen_fp4
from dsa.runtime.checks import check_choice
from dsa_layers.arguments import integer, path_of
from dsa_layers.errors import CheckpointError
from dsa_layers.families.fused_experts import split_experts
from dsa_layers.families.manifest import Manifest
from dsa_layers.families.precision import check_device
from dsa_layers.io.directory import Checkpoint
from dsa_layers.io.fp4 import GROUP, dequantize_fp4
from dsa_layers.io.hub import checkpoint_directory
from dsa_layers.io.plan import SCALE_SUFFIX, Part, scale_problem
from dsa_layers.io.problems import Problems
from dsa_layers.io.published_format import (
    STORAGES,
    Storage,
    as_published,
    copied_from,
    scales_of,
    shape_of_values,
    storage_manifest,
    stored_as,
)
from dsa_layers.io.shards import SHARD_BYTES, Shards, write_shards
from dsa_layers.layers.linear import BLOCK

_FLOATS = ("BF16", "F16", "F32")


def convert_checkpoint(
    source: str | PathLike[str],
    directory: str | PathLike[str],
    dtype: Storage,
    *,
    shard_bytes: int = SHARD_BYTES,
    device: torch.device | str | None = None,
    progress: bool = True,
) -> None:
    """Writes the checkpoint `source` into `directory` with weights in `dtype`, one file at a time.

    source       a checkpoint that `load_model` reads, or a hub id
    directory    new or empty, or one in which the same call was interrupted: its finished files stay
    dtype        "fp8": projections and experts in FP8; "fp4": experts in FP4, other projections in FP8; "bf16". A
                 weight that has this dtype is copied, and FP4 becomes FP8 without loss. What is never quantised is
                 copied, but F16 and F32 matrices that are published in BF16 become that
    shard_bytes  bytes of a file, at most; at least one tensor is in it, and in memory
    device       where weights are cast; None: the GPU where there is one, else the CPU

    config.json gets the fields that follow, and comes last. Tokenizer files are copied.
    Raises ConfigError or CheckpointError for what `load_model` would refuse, for tensors that are missing or
    unexpected, and ValueError or TypeError that names any other argument. Then nothing is written.
    """
    directory = path_of("directory", directory)
    check_choice("dtype", dtype, STORAGES)
    integer("shard_bytes", shard_bytes, at_least=1)
    device = check_device(device)
    source = checkpoint_directory(source)
    if source.resolve() == directory.resolve():
        raise ValueError(f"directory: must be another one than the checkpoint's, got {directory}")
    checkpoint = Checkpoint(source)
    parts = _parts(checkpoint)
    fields, config = stored_as(source, dtype, drafter=True)
    manifest = storage_manifest(config, dtype)
    if config.num_nextn_predict_layers:
        without_drafter = stored_as(source, dtype, drafter=False)
        main = storage_manifest(without_drafter[1], dtype)
        if not any(name in parts for name in manifest if name not in main):
            (fields, config), manifest = without_drafter, main
    # Nothing reads copies, and some checkpoints leave them out.
    manifest = {name: entry for name, entry in manifest.items() if name in parts or copied_from(name) is None}
    manifest = _with_stored_dtypes(manifest, parts)
    writer = _Writer(checkpoint, parts, manifest, device)
    writer.check()
    use_ue8m0 = config.quantization is not None and config.quantization.scale_fmt == "ue8m0"
    shards = Shards.of(manifest, shard_bytes)
    made_from = hashlib.sha256(checkpoint.sampled_digest() + repr((dtype, use_ue8m0, shards.files)).encode())
    write_shards(
        directory,
        shards,
        lambda name: writer.make(name, use_ue8m0),
        fields,
        like=source,
        made_from=made_from.hexdigest(),
        progress=progress,
    )


class _Writer:
    """Makes the tensors of a manifest of a checkpoint's parts."""

    def __init__(
        self, checkpoint: Checkpoint, parts: dict[str, Part], manifest: Manifest, device: torch.device
    ) -> None:
        self._checkpoint, self._parts, self._manifest, self._device = checkpoint, parts, manifest, device
        self._scales = scales_of(manifest)

    def check(self) -> None:
        """Raises CheckpointError for parts that are missing, unexpected or of another shape."""
        problems, read = Problems(), set()
        made_with_weight = {*self._scales.values()}
        for name in self._manifest:
            if name in made_with_weight:
                continue
            part = self._parts.get(name)
            if part is None:
                problems.add(f"{name}: missing{self._checkpoint.place_of(name)}")
                continue
            read |= {name, self._scale_name(name)}
            shape, expected = part.shape, shape_of_values(name, self._manifest)
            if shape != expected:
                problems.add(f"{part.info.file}: {part.label} has shape {list(shape)}; expected {list(expected)}")
            elif problem := self._scale_problem(part):
                problems.add(f"{part.info.file}: {problem}")
            elif not self._is_readable(part, self._manifest[name][1]):
                problems.add(f"{part.info.file}: {part.label} is {part.info.dtype}; expected {self._manifest[name][1]}")
        for name, part in self._parts.items():
            if name not in read:
                problems.add(f"{part.info.file}: unexpected {part.label} ({part.info})")
        problems.raise_if_any(self._checkpoint.directory)

    def make(self, name: str, use_ue8m0: bool) -> dict[str, torch.Tensor]:
        """A tensor of the manifest, and its scale if it has one, on the CPU."""
        part, dtype = self._parts[name], self._manifest[name][1]
        weight = self._read(part)
        scale_name = self._scale_name(name)
        if part.info.dtype == dtype and name not in self._scales:
            return {name: weight.cpu()}
        if scale_name is None:
            made = as_published(name, weight, self._manifest, self._scales, use_ue8m0=use_ue8m0)
            return {key: x.cpu() for key, x in made.items()}
        scale = self._read(self._parts[scale_name])
        kept = dtype == ("I8" if part.is_packed else part.info.dtype)
        if kept:
            made = {name: weight.view(torch.int8) if part.is_packed else weight, self._scales[name]: scale}
        elif part.is_packed and dtype == "F8_E4M3":
            q, block_scale = widen_fp4(weight, scale)
            to = torch.float8_e8m0fnu if self._manifest[self._scales[name]][1] == "F8_E8M0" else torch.float32
            made = {name: q, self._scales[name]: block_scale.to(to)}
        else:
            dequantise = dequantize_fp4 if part.is_packed else dequantize_per_block
            values = dequantise(weight, scale, torch.float32)
            made = as_published(name, values, self._manifest, self._scales, use_ue8m0=use_ue8m0)
        return {key: x.cpu() for key, x in made.items()}

    def _scale_problem(self, part: Part) -> str | None:
        """What is wrong with the scale of a quantised weight; None if nothing is."""
        scale = self._parts.get(self._scale_name(part.name))
        if part.is_packed:
            return scale_problem(part, scale, ("F8_E8M0",), (1, GROUP))
        if part.info.dtype == "F8_E4M3":
            return scale_problem(part, scale, ("F32", "F8_E8M0"), (BLOCK, BLOCK))
        return None

    @staticmethod
    def _is_readable(part: Part, dtype: str) -> bool:
        """Whether a tensor of this dtype can be made of the part."""
        return part.info.dtype == dtype or part.is_packed or part.info.dtype in (*_FLOATS, "F8_E4M3")

    def _scale_name(self, name: str) -> str | None:
        """The part with a weight's scale."""
        return next((scale for scale in _scale_names(name) if scale in self._parts), None)

    def _read(self, part: Part) -> torch.Tensor:
        return self._checkpoint.read(part.stored, self._device, part.index)


def _parts(checkpoint: Checkpoint) -> dict[str, Part]:
    """What the checkpoint holds, by the published names."""
    parts: dict[str, Part] = {}
    for stored, info in checkpoint.tensors.items():
        for name, index in split_experts(stored, info.shape).items():
            if name in parts:
                raise CheckpointError(f"{checkpoint.directory}: {name} is there twice")
            parts[name] = Part.of(name, stored, index, info)
    return parts


def _with_stored_dtypes(manifest: Manifest, parts: dict[str, Part]) -> Manifest:
    """The manifest with the dtypes of tensors that are copied as they are stored: all that are not quantised, but for
    wider matrices that are published in BF16; and the scales of weights that stay quantised."""
    found, scales = dict(manifest), scales_of(manifest)
    for name, (shape, dtype) in manifest.items():
        part = parts.get(name)
        if part is None or name in scales.values():
            continue
        if name in scales:
            stored = next((parts[scale] for scale in _scale_names(name) if scale in parts), None)
            if stored is not None and dtype == ("I8" if part.is_packed else part.info.dtype):
                found[scales[name]] = manifest[scales[name]][0], stored.info.dtype
        elif part.info.dtype in _FLOATS and not (dtype == "BF16" and len(shape) == 2):
            found[name] = shape, part.info.dtype
    return found


def _scale_names(name: str) -> tuple[str, str]:
    return name + SCALE_SUFFIX, name.removesuffix("weight") + "scale"
