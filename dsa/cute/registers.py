"""Small tensors in a thread's registers."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32


def filled(shape, value, dtype: type[cutlass.Numeric] = Float32) -> cute.Tensor:
    """New registers, all with the same value."""
    registers = cute.make_rmem_tensor(shape, dtype)
    registers.fill(value)
    return registers


def loaded(source: cute.Tensor) -> cute.Tensor:
    """Copy a tensor of static shape to new registers."""
    registers = cute.make_rmem_tensor(source.shape, source.element_type)
    cute.autovec_copy(source, registers)
    return registers


def converted(values: cute.Tensor, dtype: type[cutlass.Numeric]) -> cute.Tensor:
    """Convert values to `dtype`, in new registers."""
    registers = cute.make_rmem_tensor(values.shape, dtype)
    registers.store(values.load().to(dtype))
    return registers
