"""The ops. An op checks its arguments and runs either kernels or a PyTorch reference (dsa.runtime.op). Its module
declares the arguments, the reference and the limits of the kernels, and defines the function that allocates the results
and launches the kernels."""

from pathlib import Path


def op_modules() -> dict[str, str]:
    """Return {op: module}, with an entry for each file of dsa/ops/FAMILY whose name does not begin with an
    underscore."""
    paths = sorted(Path(__file__).parent.glob("*/[!_]*.py"))
    return {path.stem: f"dsa.ops.{path.parent.name}.{path.stem}" for path in paths}


def op_module(op: str) -> str:
    """Return the name of the op's module. Raises ValueError, with a list of the ops, if `op` is not an op."""
    modules = op_modules()
    if op not in modules:
        raise ValueError(f"op: must be one of {', '.join(modules)}, got {op!r}")
    return modules[op]
