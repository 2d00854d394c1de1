"""Weights of a checkpoint, read into a model."""

from collections.abc import Callable
from os import PathLike

import torch
from tqdm import tqdm

from dsa_layers.errors import CheckpointError
from dsa_layers.families.fused_experts import Index, sliced
from dsa_layers.io.directory import Checkpoint
from dsa_layers.io.header import MAX_TENSORS
from dsa_layers.io.memory import memory_of
from dsa_layers.io.plan import Part, Target, make_plan
from dsa_layers.io.problems import Problems

# A model that needs so many tensors, and four times what the files hold, is not compared with them one by one.
_LISTED_TENSORS = 2**14

PartsOf = Callable[[str, tuple[int, ...]], dict[str, Index]]


def _nothing(name: str) -> bool:
    return False


def _whole(name: str, shape: tuple[int, ...]) -> dict[str, Index]:
    return {name: ()}


def load_weights(
    model: torch.nn.Module,
    source: str | PathLike[str] | Checkpoint,
    *,
    device: str | torch.device = "cpu",
    skip: Callable[[str], bool] = _nothing,
    name_of: Callable[[str], str] = str,
    parts_of: PartsOf = _whole,
    progress: bool = True,
) -> None:
    """Gives `model`, built on the meta device, the tensors of the checkpoint `source` (or its directory), on `device`.

    A checkpoint tensor goes by the name `name_of` its own. Tensors of either side may hold several of the other's:
    `parts_of` a name and a shape are the names of its parts, each with its slice, () for all of it, and a part of the
    model's is made of the checkpoint's of that name. Either function may raise CheckpointError to refuse a tensor, with
    the reason. A model tensor of dtype
    - float8_e4m3fn takes an F8_E4M3 tensor as it is; its scale `<name>_scale_inv` is a model tensor of its own. Or it
      takes packed FP4, widened without loss (`dsa.widen_fp4`), and the scale follows from that;
    - int8, where the model has a tensor `<name>_block_scale` too, takes packed FP4 as it is, with its scales, which are
      the model's `<name>_scale_inv`; the block scales follow from both (`dsa.fp4_block_scales`);
    - bf16, fp16, fp32 or fp64 takes a float tensor, cast, or an F8_E4M3 or FP4 matrix, dequantised with its
      `<name>_scale_inv`, which is then no model tensor;
    - any other takes its own dtype only.
    FP8 has one scale per 128 x 128 block, F32 or F8_E8M0; FP4 (I8 of [O, I / 2], or F4) one F8_E8M0 per 32 columns.
    Checkpoint tensors for which `skip` is true are treated as absent. Non-persistent buffers are left alone.
    Parameters come without requires_grad. progress: one bar over all bytes that are read.

    Raises CheckpointError, with the model unchanged, for every problem of `Checkpoint` and for tensors that are
    missing, unexpected, refused, there twice, or of the wrong shape or dtype: these are looked for before anything is
    read, and reported together. Also for a model larger than the memory of `device`, if a file then cannot be read, or
    for a block of FP4 weights that e4m3 cannot hold, of those that stay FP4 too: they are multiplied as e4m3.
    """
    checkpoint = source if isinstance(source, Checkpoint) else Checkpoint(source)
    problems = Problems()
    parts = _parts(checkpoint, skip, name_of, parts_of, problems)
    wanted = _targets(model, checkpoint, parts_of, 4 * len(parts) + _LISTED_TENSORS)
    steps = make_plan(wanted, parts, problems, checkpoint.place_of)
    problems.raise_if_any(checkpoint.directory)
    _check_memory(model, checkpoint, device)

    loaded: dict[str, torch.Tensor] = {}
    total = sum(part.info.size for step in steps for part in step.parts)
    with tqdm(total=total, unit="B", unit_scale=True, desc="Loading", disable=None if progress else True) as bar:
        for step in steps:
            tensors = []
            for part in step.parts:
                tensors.append(checkpoint.read(part.stored, device, part.index))
                bar.update(part.info.size)
            try:
                for name, tensor in step.make(*tensors).items():
                    _place(tensor, wanted[name], loaded)
            except (ValueError, RuntimeError, MemoryError) as error:
                part = step.parts[0]
                raise CheckpointError(f"{checkpoint.directory / part.info.file}: {part.label}: {error}") from error
    _assign(model, loaded)


def _parts(
    checkpoint: Checkpoint,
    skip: Callable[[str], bool],
    name_of: Callable[[str], str],
    parts_of: PartsOf,
    problems: Problems,
) -> dict[str, Part]:
    """What the checkpoint holds, by the model's names, in the order of the files."""
    parts: dict[str, Part] = {}
    for stored, info in checkpoint.tensors.items():
        if skip(stored):
            continue
        try:
            places = parts_of(name_of(stored), info.shape)
        except CheckpointError as error:
            problems.add(f"{info.file}: {stored}: {error}")
            continue
        for name, index in places.items():
            part = Part.of(name, stored, index, info)
            if name in parts:
                problems.add(f"{info.file}: {part.label} is there twice, as {parts[name].stored} too")
            parts[name] = part
        if len(parts) > MAX_TENSORS:
            raise CheckpointError(f"{checkpoint.directory}: holds more than {MAX_TENSORS} tensors and parts of tensors")
    return parts


def _targets(model: torch.nn.Module, checkpoint: Checkpoint, parts_of: PartsOf, most: int) -> dict[str, Target]:
    """The model's tensors, cut as the checkpoint's are. Raises CheckpointError if these are more than `most`."""
    targets: dict[str, Target] = {}
    for name, tensor in model.state_dict().items():
        whole = tuple(tensor.shape)
        for piece, index in parts_of(name, whole).items():
            targets[piece] = Target(name, index, sliced(whole, index), whole, tensor.dtype)
        if len(targets) > most:
            raise CheckpointError(
                f"{checkpoint.directory}: the model that config.json describes is made of more than {most} tensors; "
                f"the files hold {len(checkpoint.tensors)}"
            )
    return targets


def _check_memory(model: torch.nn.Module, checkpoint: Checkpoint, device: str | torch.device) -> None:
    """Raises CheckpointError for a model that `device` cannot hold, which would end the process minutes into the load:
    files can be larger than the disk that they are on."""
    needed, memory = sum(tensor.nbytes for tensor in model.state_dict().values()), memory_of(device)
    if memory is not None and needed > memory:
        raise CheckpointError(
            f"{checkpoint.directory}: the model takes {needed / 1e9:.1f} GB; the memory of {device} is "
            f"{memory / 1e9:.1f} GB"
        )


def _place(tensor: torch.Tensor, target: Target, loaded: dict[str, torch.Tensor]) -> None:
    if not target.index:
        loaded[target.name] = tensor
        return
    if target.name not in loaded:
        loaded[target.name] = torch.empty(target.whole, dtype=tensor.dtype, device=tensor.device)
    loaded[target.name][target.index] = tensor


def _assign(model: torch.nn.Module, tensors: dict[str, torch.Tensor]) -> None:
    modules = dict(model.named_modules())
    for name, tensor in tensors.items():
        owner, _, attribute = name.rpartition(".")
        module = modules[owner]
        is_parameter = attribute in module._parameters
        setattr(module, attribute, torch.nn.Parameter(tensor, requires_grad=False) if is_parameter else tensor)
