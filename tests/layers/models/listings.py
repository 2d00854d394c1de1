"""The tensors of published checkpoints, from listings of names, shapes and dtypes under VENDORED, and of models."""

import json
import math
import re

from dsa_layers.io.tensors import split_experts
from dsa_layers.models.family import VENDORED


def expand(name: str) -> list[str]:
    """Return all names of a pattern. {a-b} stands for each integer from a to b, {a-b:2} for every second integer."""
    match = re.search(r"\{(\d+)-(\d+)(?::(\d+))?\}", name)
    if match is None:
        return [name]
    numbers = range(int(match[1]), int(match[2]) + 1, int(match[3] or 1))
    return [full for number in numbers for full in expand(f"{name[: match.start()]}{number}{name[match.end() :]}")]


def read_listing(file: str) -> dict[str, tuple[tuple[int, ...], str]]:
    """Return {name: (shape, dtype)} of every tensor of the listing `file`, and check the listing's totals."""
    listing = json.loads((VENDORED / file).read_text())
    entries = listing["by_name"].items()
    tensors = {full: (tuple(shape), dtype) for name, (shape, dtype) in entries for full in expand(name)}
    assert len(tensors) == listing["tensors"]
    assert sum(math.prod(shape) for shape, _ in tensors.values()) == listing["elements"]
    return tensors


def parts(model):
    """Return {name: tensor} of a model. A tensor of all experts is cut per expert and projection, as in checkpoints."""
    state = model.state_dict().items()
    pieces = ((tensor, split_experts(name, tuple(tensor.shape))) for name, tensor in state)
    return {piece: tensor[index] if index else tensor for tensor, of in pieces for piece, index in of.items()}
