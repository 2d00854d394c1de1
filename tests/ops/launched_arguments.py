"""What ops give to kernels against what these are compiled for, without a GPU: how many arguments, which are None, the
dtypes and the dimensions of tensors. A kernel that is called otherwise raises at its first launch on a GPU.

python -m tests.ops.launched_arguments: prints a line a difference, and at the end how many kernels were launched. It
replaces the compiler for the whole process, so tests run it in one of its own.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

import dsa
from dsa import backends
from dsa.cute import compile_cache
from dsa.cute.fake_tensors import cute_dtype
from dsa.ops._kernel_arguments import dtype_name
from tests.valid_calls import CALLS
from tests.valid_calls.description import Maker


def differences(arguments: Sequence[Any], fakes: Sequence[Any]) -> Iterator[str]:
    """Of a launch from the fake arguments that its kernel is compiled with, the last of them the stream."""
    expected = fakes[:-1]
    if len(arguments) != len(expected):
        yield f"{len(arguments)} arguments for {len(expected)}"
        return
    for i, (given, fake) in enumerate(zip(arguments, expected)):
        if (given is None) != (fake is None):
            yield f"argument {i}: {'None' if given is None else type(given).__name__} for {fake}"
        elif isinstance(given, torch.Tensor):
            shape = getattr(fake, "shape", None)
            if shape is None or len(shape) != given.dim():
                yield f"argument {i}: shape {list(given.shape)} for {shape}"
            elif fake.element_type.width != 8 * given.element_size() or not _same_type(given.dtype, fake.element_type):
                yield f"argument {i}: {given.dtype} for {fake.element_type}"
            else:
                fixed = [(n, m) for n, m in zip(given.shape, shape) if isinstance(m, int)]
                if any(n != m for n, m in fixed):
                    yield f"argument {i}: shape {list(given.shape)} for {shape}"


def _same_type(dtype: torch.dtype, element_type: Any) -> bool:
    try:
        return cute_dtype(dtype_name(dtype)) is element_type
    except KeyError:  # a type that only some kernels have
        return str(element_type).lower() == dtype_name(dtype)


def larger_calls() -> Iterator[tuple[str, Callable[[], object]]]:
    """Of ops that have kernels for small arguments and for large ones."""
    make = Maker("cpu")

    def product(rows: int) -> Callable[[], object]:
        a, b = (make.e4m3(rows, 128), make.positive(rows, 1)), (make.e4m3(136, 128), make.positive(2, 1))
        return lambda: dsa.fp8_gemm_nt(a, b)

    def grouped(op: str, count: int, **options: Any) -> Callable[[], object]:
        a = make.e4m3(count, 128), make.positive(count, 1)
        b = make.e4m3(2, 256, 128), make.positive(2, 2, 1)
        if "fp4" in op:
            packed = torch.zeros(2, 256, 64, dtype=torch.int8)
            scale = torch.full((2, 256, 4), 127, dtype=torch.uint8).view(torch.float8_e8m0fnu)
            b = packed, scale, dsa.fp4_block_scales(packed, scale)
        ends = make.ints([count // 2, count])
        return lambda: getattr(dsa, op)(a, b, ends, **options)

    for rows in (1, 600, 5000):
        yield f"fp8_gemm_nt of {rows} rows", product(rows)
    for op in ("grouped_fp8_gemm_nt", "grouped_fp8_gemm_swiglu", "grouped_fp8_fp4_gemm_nt"):
        for rows in (40, 600, 3000):
            of_rows = torch.arange(rows, dtype=torch.int32)
            yield f"{op} of {rows} rows", grouped(op, rows)
            yield f"{op} of {rows} gathered rows", grouped(op, rows, rows=of_rows)
            if "swiglu" not in op:
                yield f"{op} of {rows} weighted rows", grouped(op, rows, weights=torch.ones(rows))
    for tokens in (1, 300, 3000):
        streams, parts = make.bf16(tokens, 4, 64), make.bf16(3, 24, 256)
        yield f"hyper_mix of {tokens} tokens", lambda streams=streams, parts=parts: dsa.hyper_mix(streams, parts)


def main() -> None:
    launched, found, name = [0], [], [""]

    def compile_for(target: str, kernel: Any, *fakes: Any) -> Callable[..., None]:
        def launch(*arguments: Any) -> None:
            launched[0] += 1
            found.extend(f"{name[0]}: {type(kernel).__name__}: {x}" for x in differences(arguments, fakes))

        return launch

    compile_cache.compile_for = compile_for
    compile_cache._load_or_compile = lambda function, arguments: function(*arguments)
    backends.runs_kernel = lambda *_: True
    backends.arch_of = lambda _: "sm_90"
    backends.on_device = lambda _: contextlib.nullcontext()
    calls = [(call.name, lambda call=call: call.run(call.arguments())) for call in CALLS]
    for name[0], call in (*calls, *larger_calls()):
        # Nothing has run: an op that goes on with its kernel's numbers finds any.
        with contextlib.suppress(IndexError):
            call()
    print(*dict.fromkeys(found), f"{launched[0]} launches", sep="\n")


if __name__ == "__main__":
    main()
