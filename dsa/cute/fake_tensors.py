"""Stand-ins for tensors and streams, which kernels are compiled with: no GPU and no memory is needed for it."""

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
    """The DSL's type for a torch dtype's name without the `torch.` in front."""
    return _BY_NAME[name]


def fake(dtype: type[cutlass.Numeric], shape: tuple, stride: tuple, align: int = 16) -> cute.Tensor:
    """A tensor at a multiple of `align` bytes. Extents and strides are ints, or symbols (cute.sym_int and sym_int64),
    which the compiled kernel takes at any value. Offsets have 64 bits if a stride is a symbol of 64 bits; where all
    strides are ints they have 32, so that such a tensor must have less than 2^31 elements, whatever its extents are."""
    return cute.runtime.make_fake_tensor(dtype, shape, stride, assumed_align=align)


def strides(count: int, divisibility: int = 1) -> tuple:
    """So many strides of 64 bits, of any value that is a multiple of `divisibility` elements."""
    return tuple(cute.sym_int64(divisibility=divisibility) for _ in range(count))


def fake_stream():
    """The caller's current stream, which TVM-FFI looks up at each launch."""
    return cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
