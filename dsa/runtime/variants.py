"""The name of a kernel's compiled variant, the variants that differ from it in the tile, and a hook that replaces
compilation. This module imports no compiler."""

import importlib
import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

Kernel = Callable[..., None]


class Variant(NamedTuple):
    """A call of a compile function: the name of the kernel module, the name of the function, and the arguments."""

    module: str
    function: str
    arguments: tuple[Any, ...]


# Called in place of the compile functions. `asked_variants` and tests set it.
stand_in: Callable[[Variant], Kernel] | None = None

# {compile function: position of the tile among its arguments}, for kernels that choose the tile from the number of
# rows. If a pass requests one of these kernels, all its tiles are compiled.
TILES = {
    "compile_apply_rotary": 2,
    "compile_fp8_fp4_gemm": 1,
    "compile_fp8_fp4_gemm_few_rows": 1,
    "compile_fp8_gemm": 1,
    "compile_fp8_gemm_few_rows": 1,
    "compile_fp8_gemm_swiglu": 3,
    "compile_grouped_fp8_gemm": 1,
    "compile_grouped_fp8_gemm_few_rows": 1,
    "compile_hyper_expand_mix": 0,
    "compile_hyper_mix": 0,
    "compile_hyper_mix_few_tokens": 0,
    "compile_linear_fp32": 1,
    "compile_mla_combine": 1,
    "compile_per_token_cast_to_fp8": 3,
    "compile_route_by_table": 1,
    "compile_route_to_experts": 1,
    "compile_sparse_mla_combine": 1,
    "compile_sparse_mla_fp8_kv": 1,
    "compile_topk_indices": 1,
}


def with_all_tiles(variants: Iterable[Variant]) -> set[Variant]:
    """Return the variants and all shipped variants that differ from one of them only in the tile (`TILES`)."""
    return {other for variant in variants for other in (variant, *_other_tiles(variant))}


def _other_tiles(variant: Variant) -> Iterator[Variant]:
    place = TILES.get(variant.function)
    if place is None:
        return
    module, given = importlib.import_module(variant.module), variant.arguments
    signature = inspect.signature(getattr(module, variant.function))

    def others(arguments: tuple) -> tuple:
        """Return the arguments without the tile. Missing arguments are replaced by their defaults."""
        bound = signature.bind(*arguments)
        bound.apply_defaults()
        return bound.args[:place] + bound.args[place + 1 :]

    for function, arguments in module.shipped_variants():
        if function.__name__ == variant.function and others(arguments) == others(given):
            yield variant._replace(arguments=(*given[:place], arguments[place], *given[place + 1 :]))


def growing(most: int, factor: float) -> list[int]:
    """Return increasing integers from 1 to `most`. Each number is the previous one times `factor`, rounded down, or the
    previous one plus 1 if that is larger."""
    numbers = [1]
    while numbers[-1] < most:
        numbers.append(min(most, max(numbers[-1] + 1, int(numbers[-1] * factor))))
    return numbers
