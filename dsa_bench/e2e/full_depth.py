"""What all layers of a published model take, from its stack at three depths."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from torch import nn

from dsa_bench.e2e.stacks import STACKS
from dsa_layers.families.model import CheckpointModel
from dsa_layers.families.published import published_config


class Depths(NamedTuple):
    """Of a stack: without any layer, with its first one alone, and as it is."""

    ends: float
    first: float
    whole: float


def depths(model: CheckpointModel) -> tuple[int, int, int]:
    """How many layers these have."""
    return 0, 1, len(layers_of(model))


def full_depth(name: str, found: Depths) -> float:
    """ends + F * (first - ends) + (N - F) * (whole - first) / (n - 1), of milliseconds or bytes.

    A stack of n layers begins with one of the kind with which the published model of N layers begins: F of its layers
    have no experts (V3.2, GLM-5), or attend to windows alone (V4). All others count as the mean of the stack's others,
    which are of one kind, and in V4 of two in equal parts, as the published ones are.
    """
    file, fields = STACKS[name]
    published = published_config(file)
    layers, alike = published["num_hidden_layers"], _like_the_first(published)
    rest = (found.whole - found.first) / (fields["num_hidden_layers"] - 1)
    return found.ends + alike * (found.first - found.ends) + (layers - alike) * rest


def _like_the_first(published: dict) -> int:
    if "compress_ratios" in published:
        return published["compress_ratios"][: published["num_hidden_layers"]].count(0)
    return published["first_k_dense_replace"]


@contextmanager
def first_layers(model: CheckpointModel, count: int) -> Iterator[None]:
    """Within the block the model has its first `count` layers alone. A cache is to be made before."""
    layers = layers_of(model)
    left_out = list(layers)[count:]
    del layers[count:]
    try:
        yield
    finally:
        layers.extend(left_out)


def layers_of(model: CheckpointModel) -> nn.ModuleList:
    """The model's layers, without its drafter's."""
    (found,) = (module for name, module in model.named_modules() if name in ("layers", "model.layers"))
    return found
