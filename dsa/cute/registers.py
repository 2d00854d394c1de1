"""Small tensors in a thread's registers, and loads of a row's vectors into them."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32


def filled(shape, value, dtype: type[cutlass.Numeric] = Float32) -> cute.Tensor:
    registers = cute.make_rmem_tensor(shape, dtype)
    registers.fill(value)
    return registers


def loaded(source: cute.Tensor) -> cute.Tensor:
    """Copy `source`, a tensor of static shape, to registers, and return the copy."""
    registers = cute.make_rmem_tensor(source.shape, source.element_type)
    cute.autovec_copy(source, registers)
    return registers


def converted(values: cute.Tensor, dtype: type[cutlass.Numeric]) -> cute.Tensor:
    registers = cute.make_rmem_tensor(values.shape, dtype)
    registers.store(values.load().to(dtype))
    return registers


@cute.jit
def sum_in_order(values: cute.Tensor) -> Float32:
    """Return the sum of fp32 values, added in order, starting from zero."""
    total = Float32(0.0)
    for i in cutlass.range_constexpr(cute.size(values)):
        total += values[i]
    return total


@cute.jit
def load_vectors(row: cute.Tensor, values: cute.Tensor, first: Int32, step: cutlass.Constexpr, count):
    """Load the row's vectors `first`, `first` + `step` and so on into the columns of values [width, vectors]. A vector
    is `width` adjacent elements, and the row has `count` vectors. The column for a vector past the end of the row stays
    unchanged."""
    for n in cutlass.range_constexpr(values.shape[1]):
        at = first + n * step
        if at < count:
            cute.autovec_copy(cute.local_tile(row, (values.shape[0],), (at,)), values[None, n])
