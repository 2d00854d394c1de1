"""A trained model as a checkpoint in its family's published format: quantised, under the published names."""

import json
from os import PathLike
from pathlib import Path

from dsa_layers.families.config import config_of
from dsa_layers.families.fields import MAX_CONFIG_BYTES, Fields, read_object
from dsa_layers.families.fused_experts import split_experts
from dsa_layers.families.model import CheckpointModel
from dsa_layers.families.precision import Precision
from dsa_layers.families.registry import family
from dsa_layers.io.checks import check_quantised_sizes
from dsa_layers.io.directory import INDEX_NAME, SINGLE_NAME
from dsa_layers.io.published_format import as_published, save_tensors, scales_of, shape_of_values
from dsa_layers.output_files import naming
from dsa_layers.untrusted_files import is_there


def save_fp8_checkpoint(model: CheckpointModel, directory: str | PathLike[str], fields: dict[str, object]) -> None:
    """Writes model.safetensors and config.json into `directory`, which `load_model` then reads.

    model   of any family, with float weights, of any dtype and on any device
    fields  of config.json, with its `quantization_config`. The family's manifest says which weights are quantised: to
            FP8 in blocks of 128 x 128, with powers of two as scales if its `scale_fmt` is "ue8m0", or to FP4

    Raises ValueError for a directory with a checkpoint in several files, for fields without quantisation, or of another
    shape than the model, for fields or a generation_config.json there that `load_model` would refuse, and for a
    manifest with dtypes that cannot be written. Then nothing is written.
    """
    directory = Path(directory)
    if is_there(directory / INDEX_NAME):
        raise ValueError(f"directory: must hold no {INDEX_NAME}, got {directory}")
    written = json.dumps(fields, indent=2) + "\n"
    if len(written) > MAX_CONFIG_BYTES:
        raise ValueError(f"fields: must take at most {MAX_CONFIG_BYTES} bytes as JSON, got {len(written)}")
    generation_path = directory / "generation_config.json"
    generation = read_object(generation_path) if is_there(generation_path) else None
    config = config_of(Fields(json.loads(written), directory / "config.json"), generation)
    if config.quantization is None:
        raise ValueError("fields: must have a quantization_config")
    check_quantised_sizes(config, Precision.of(config, kv_cache="model"), directory / "config.json")
    use_ue8m0 = config.quantization.scale_fmt == "ue8m0"
    floats = {}
    for name, tensor in model.state_dict().items():
        places = split_experts(name, tuple(tensor.shape))
        floats |= {stored: tensor[index] if index else tensor for stored, index in places.items()}
    manifest = family(config.model_type).manifest(config)
    scales = scales_of(manifest)
    made_with_weight = set(scales.values())
    tensors, stored_at = {}, set()
    for stored in manifest:
        if stored in made_with_weight:
            continue
        name, shape = model.name_of(stored), shape_of_values(stored, manifest)
        if name not in floats or tuple(floats[name].shape) != shape:
            got = list(floats[name].shape) if name in floats else "none"
            hint = "" if name in floats or model.drafter else "; num_nextn_predict_layers must be 0 without a drafter"
            raise ValueError(f"fields: {stored} has shape {list(shape)}, the model's {got}{hint}")
        value = floats[name].detach().cpu()
        if value.data_ptr() in stored_at:  # a drafter shares the embedding and the head; a file does not
            value = value.clone()
        stored_at.add(value.data_ptr())
        tensors |= as_published(stored, value, manifest, scales, use_ue8m0=use_ue8m0)
    directory.mkdir(parents=True, exist_ok=True)
    with naming(directory / "config.json"):
        (directory / "config.json").write_text(written, encoding="utf-8")
    save_tensors(directory / SINGLE_NAME, tensors, like=directory / "config.json")
