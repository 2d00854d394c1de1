"""Names of dtypes, as the compile functions take them, and the DSL's types."""

import cutlass

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
