"""DeepGEMM's helpers for layouts, as they are on Hopper: the alignment of groups, and the storage of scales."""

from collections.abc import Sequence

import torch

from dsa.compat.deep_gemm.arguments import as_recipe
from dsa.runtime.checks import check_flag, check_int, check_tensor, shape_of

HOPPER_ALIGNMENT = 128

_alignment = HOPPER_ALIGNMENT


def set_mk_alignment_for_contiguous_layout(new_value: int) -> None:
    """Set the alignment for this process: groups of the contiguous layout begin at a multiple of this number of rows.
    The default is 128."""
    global _alignment
    check_int("new_value", new_value, 1)
    _alignment = new_value


def get_mk_alignment_for_contiguous_layout() -> int:
    """Return the alignment that `set_mk_alignment_for_contiguous_layout` has set, by default 128."""
    return _alignment


def get_theoretical_mk_alignment_for_contiguous_layout(expected_m: int | None = None) -> int:
    """Return the best alignment for this number of expected rows per group: on Hopper always 128."""
    if expected_m is not None:
        check_int("expected_m", expected_m, 0)
    return HOPPER_ALIGNMENT


def get_tma_aligned_size(x: int, element_size: int) -> int:
    """Return the least number of elements, at least x, whose bytes are a multiple of 16."""
    check_int("x", x, 0)
    check_int("element_size", element_size, 1, 16)
    if 16 % element_size:
        raise ValueError(f"element_size: must divide 16, got {element_size}")
    return -(-x * element_size // 16) * 16 // element_size


def get_mn_major_tma_aligned_tensor(sf: torch.Tensor) -> torch.Tensor:
    """Store fp32 scales [M, n] or [E, M, n] column-major, with columns that start at multiples of 16 bytes.

    Returns a tensor of the same shape and values; if sf already has this layout, returns sf itself. The products accept
    scales in this layout and row-major.
    """
    shape = shape_of(sf)
    check_tensor("sf", sf, (torch.float32,), ("M", "n") if len(shape) < 3 else ("E", "M", "n"))
    *groups, rows, columns = shape
    column = get_tma_aligned_size(rows, sf.element_size())
    strides = (*(columns * column for _ in groups), 1, column)
    if sf.stride() == strides:
        return sf
    return torch.empty_strided(shape, strides, dtype=sf.dtype, device=sf.device).copy_(sf)


def transform_sf_into_required_layout(
    sf: torch.Tensor,
    mn: int,
    k: int,
    recipe: Sequence[int],
    num_groups: int | None = None,
    is_sfa: bool | None = None,
    disable_ue8m0_cast: bool = False,
    psum_layout: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the scales of an operand [mn, k] in the layout that DeepGEMM's Hopper kernels read.

    sf          fp32 [ceil(mn / rows), ceil(k / 128)], or [num_groups, ceil(mn / rows), ceil(k / 128)]; a scale is for
                `rows` rows
    recipe      (rows, 128), or with is_sfa the recipe of a product: (rows for a, rows for b, 128)
    num_groups  the number of matrices to which sf belongs; None: one, and sf has no dimension for it
    is_sfa      for a recipe of three numbers, whether sf belongs to a (True) or b (False); None for a recipe of two

    Scales per row are stored by `get_mn_major_tma_aligned_tensor`; scales per 128 x 128 block are returned unchanged.
    `disable_ue8m0_cast` and `psum_layout` have no effect.
    """
    check_int("mn", mn, 0)
    check_int("k", k, 0)
    if num_groups is not None:
        check_int("num_groups", num_groups, 0)
    if is_sfa is not None:
        check_flag("is_sfa", is_sfa)
    rows = _rows_per_scale(as_recipe("recipe", recipe), is_sfa)
    groups = () if num_groups is None else (num_groups,)
    check_tensor("sf", sf, (torch.float32,), (*groups, -(-mn // rows), -(-k // 128)), "mn, k, recipe and num_groups")
    return get_mn_major_tma_aligned_tensor(sf) if rows == 1 else sf


def _rows_per_scale(recipe: tuple[int, ...] | None, is_sfa: bool | None) -> int:
    accepted = [(1, 128), (128, 128)] if is_sfa is None else [(1, 128, 128), (1, 1, 128)]
    if recipe not in accepted:
        given = "without is_sfa" if is_sfa is None else "with is_sfa"
        raise ValueError(f"recipe: must be {accepted[0]} or {accepted[1]} {given} on Hopper, got {recipe}")
    return recipe[1] if is_sfa is False else recipe[0]
