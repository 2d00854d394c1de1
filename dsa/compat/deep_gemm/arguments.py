"""Checks for all products of DeepGEMM: operands, recipes, results, and arguments that Hopper does not support."""

from collections.abc import Sequence

import torch

from dsa.ops.gemm.fp8_fp4_gemm_nt import BYTES
from dsa.ops.gemm.fp8_gemm_nt import Scaled
from dsa.runtime.checks import check_apart, check_pair, check_same_device, check_writable

Recipe = Sequence[int] | None

BLOCK_SCALES = (1, 128, 128)  # b has a scale per 128 x 128 block
ROW_SCALES = (1, 1, 128)  # b has a scale per row and 128 channels, like a


def operands(a: Scaled, b: Scaled) -> tuple[Scaled, Scaled]:
    """Return a and b as pairs. Raise ValueError for FP4 weights; the message names the ops that accept them."""
    q, w = (check_pair(name, value, "(e4m3 values, fp32 scales)") for name, value in (("a", a), ("b", b)))
    if isinstance(w[0], torch.Tensor) and w[0].dtype in BYTES:
        raise ValueError(
            "b[0]: dtype must be float8_e4m3fn on Hopper, got FP4 values in bytes: make FP8 of them with "
            "dsa.widen_fp4, or multiply them with dsa.grouped_fp8_fp4_gemm_nt"
        )
    return q, w


def find_recipe(
    recipe: Recipe, recipe_a: Recipe, recipe_b: Recipe, accepted: Sequence[tuple[int, int, int]] = (BLOCK_SCALES,)
) -> tuple[int, int, int]:
    """Return the recipe of a call: (rows per scale of a, rows per scale of b, channels per scale of both).

    recipe    three numbers, or None
    recipe_a  if recipe is None: (rows, channels) per scale of a, given together with recipe_b for b. If all three
              arguments are None, the recipe is the first of accepted
    """
    recipe = as_recipe("recipe", recipe)
    recipe_a, recipe_b = as_recipe("recipe_a", recipe_a), as_recipe("recipe_b", recipe_b)
    if recipe is None and recipe_a is None and recipe_b is None:
        return accepted[0]
    if recipe is None:
        _check_recipe("recipe_a", recipe_a, {(a, channels) for a, _, channels in accepted}, "with recipe_b")
        _check_recipe("recipe_b", recipe_b, [(b, channels) for _, b, channels in accepted], "with recipe_a")
        return recipe_a[0], *recipe_b
    for name, value in (("recipe_a", recipe_a), ("recipe_b", recipe_b)):
        if value is not None:
            raise ValueError(f"{name}: must be None with recipe, got {value}")
    _check_recipe("recipe", recipe, accepted)
    return recipe


def as_recipe(name: str, value: object) -> tuple[int, ...] | None:
    """Return a recipe as a tuple. Raise TypeError unless it is None or a list or tuple of ints."""
    if value is None:
        return None
    if not isinstance(value, (list, tuple)) or not all(type(number) is int for number in value):
        got = value if isinstance(value, (list, tuple)) else type(value).__name__
        raise TypeError(f"{name}: must be a tuple of ints or None, got {got}")
    return tuple(value)


def _check_recipe(
    name: str, value: tuple[int, ...] | None, accepted: Sequence[tuple[int, ...]], with_what: str = ""
) -> None:
    if value not in accepted:
        choices = " or ".join(map(str, accepted))
        raise ValueError(f"{name}: must be {choices}{with_what and ' ' + with_what} on Hopper, got {value}")


def refuse(**arguments: object) -> None:
    """Raise ValueError for any argument that is not None. DeepGEMM accepts these arguments, but not on Hopper."""
    for name, value in arguments.items():
        if value is not None:
            raise ValueError(f"{name}: must be None on Hopper, got {type(value).__name__}")


def check_result(d: torch.Tensor, q: torch.Tensor) -> None:
    """Check that d can be written and is on the device of q."""
    check_same_device(("a[0]", q), d=d)
    check_writable("d", d)
    check_apart("d", d, **{"a[0]": q})
    if d.shape[-1] > 1 and d.stride(-1) != 1:
        raise ValueError(f"d: the last dimension must be contiguous, got strides {list(d.stride())}")
