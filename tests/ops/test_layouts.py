"""The helpers with which ops bring tensors into the layouts that kernels accept."""

import pytest
import torch

from dsa.cute.limits import MAX_SLOTS
from dsa.ops.cache._specs import pages_as_rows
from dsa.runtime.checks import MOST_SLOTS, PAGES, check_layout, dtype_name, unit_inner, with_dims


@pytest.mark.parametrize(
    ("dtype", "name"), [(torch.float8_e4m3fn, "float8_e4m3fn"), (torch.bfloat16, "bfloat16"), (torch.int64, "int64")]
)
def test_dtype_name(dtype, name):
    assert dtype_name(dtype) == name


def test_pages_are_rows_of_the_same_memory():
    wide = torch.arange(3 * 64, dtype=torch.uint8).view(3, 64)
    cache = wide[1:, :40].unflatten(1, (4, 1, 10))
    check_layout("cache", cache, PAGES)
    rows = pages_as_rows(cache)
    assert rows.stride() == (64, 1) and torch.equal(rows, wide[1:, :40])
    rows[1, 39] = 200
    assert cache[1, 3, 0, 9] == 200


@pytest.mark.parametrize("stride", [0, 7, 160])
def test_a_single_page_may_have_any_stride(stride):
    cache = torch.arange(40, dtype=torch.uint8).as_strided((1, 4, 1, 10), (stride, 10, 10, 1))
    check_layout("cache", cache, PAGES)
    rows = pages_as_rows(cache)
    # Kernels need page strides that are multiples of 16 bytes, and a page has 40 bytes.
    assert rows.stride() == (48, 1) and rows.tolist() == [list(range(40))]


def test_no_pages():
    cache = torch.zeros(0, 4, 1, 12, dtype=torch.uint8)
    assert pages_as_rows(cache).shape == (0, 48)


def test_dimensions_are_merged_or_added():
    x = torch.arange(48.0).view(2, 4, 6)
    assert with_dims(x, 3) is x and torch.equal(with_dims(x, 2), x.view(8, 6))
    assert with_dims(x[0, 0], 2).shape == (1, 6) and with_dims(x, 5).shape == (1, 1, 2, 4, 6)
    assert with_dims(x[..., 1:3], 2).stride() == (6, 1)
    assert with_dims(x.view(2, 2, 2, 6), 3).shape == (4, 2, 6)


def test_unit_inner():
    matrix = torch.arange(12.0).view(3, 4)
    assert unit_inner(matrix) is matrix and unit_inner(matrix.T).stride() == (1, 4)
    column = matrix[:, 2:3].as_strided((3, 1), (4, 9))
    assert unit_inner(column).stride() == (4, 1) and unit_inner(column).tolist() == column.tolist()
    assert unit_inner(matrix[0, ::4]).stride() == (1,)


def test_kernels_and_references_number_as_many_slots():
    assert MAX_SLOTS == MOST_SLOTS == 2**31
