"""Stand-ins for tensors and streams, with which kernels are compiled. They need neither a GPU nor memory."""

import cutlass
import cutlass.cute as cute

_BY_NAME = {
    "bfloat16": cutlass.BFloat16,
    "float16": cutlass.Float16,
    "float32": cutlass.Float32,
    "float8_e4m3fn": cutlass.Float8E4M3FN,
    "int32": cutlass.Int32,
    "int64": cutlass.Int64,
    "uint8": cutlass.Uint8,
}


def cute_dtype(name: str) -> type[cutlass.Numeric]:
    """Return the DSL's type for the torch dtype with this name, such as "bfloat16"."""
    return _BY_NAME[name]


def fake(dtype: type[cutlass.Numeric], shape: tuple, stride: tuple, align: int = 16) -> cute.Tensor:
    """Return a fake tensor aligned to `align` bytes. Extents and strides are ints or symbols. The compiled kernel
    accepts any value that has the symbol's divisibility. Offsets are 64-bit if a stride is a 64-bit symbol. If all
    strides are ints, offsets are 32-bit, and the tensor must have fewer than 2^31 elements."""
    return cute.runtime.make_fake_tensor(dtype, shape, stride, assumed_align=align)


def strides(count: int, divisibility: int = 1) -> tuple:
    """Return `count` 64-bit symbols for strides that are multiples of `divisibility` elements."""
    return tuple(cute.sym_int64(divisibility=divisibility) for _ in range(count))


def fake_rows(dtype: type[cutlass.Numeric], *shape, align: int = 16) -> cute.Tensor:
    """Return a fake tensor with a contiguous last dimension, whose rows start at multiples of `align` bytes."""
    return fake(dtype, shape, (*strides(len(shape) - 1, 8 * align // dtype.width), 1), align)


def fake_contiguous(dtype: type[cutlass.Numeric], *shape) -> cute.Tensor:
    """Return a contiguous fake tensor of one or two dimensions, aligned to the size of an element."""
    return fake(dtype, shape, (*shape[1:], 1), dtype.width // 8)


def fake_stream():
    """Return a stand-in for a stream. At each launch TVM-FFI passes the caller's current stream."""
    return cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
