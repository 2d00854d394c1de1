"""Which compiled variants of kernels the passes of a model ask for."""

import importlib
import inspect
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from dsa.runtime.asked_variants import asked_variants
from dsa.runtime.variants import Variant
from dsa_layers.compilation.passes import passes, without_memory
from dsa_layers.config.model_config import ModelConfig
from dsa_layers.models.precision import Precision
from dsa_layers.parallel.one_shot_sum import RANKS, compiled_sums

# {compile function whose work tile follows from the number of rows: position of the tile among its arguments}. All
# tiles of a kernel that passes ask for are compiled.
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


def precisions(config: ModelConfig, *, widen_experts: bool, **options: Any) -> list[Precision]:
    """Return the precisions that `load_model` may choose with these options, which are those of `Precision.of`: two if
    only the files say how experts are stored."""
    precision = Precision.of(config, **options)
    stored = config.quantization.expert_dtype if precision.fp8_linear and not widen_experts else "fp8"
    found = [] if stored == "fp4" else [precision]
    return found if stored == "fp8" else [*found, replace(precision, fp4_experts=True)]


def model_variants(
    config: ModelConfig, precisions: Iterable[Precision], arch: str = "sm_90", *, drafts: int = 0, gpus: int = 1
) -> list[Variant]:
    """Return the variants that a generator's passes over the model ask for, in any of these precisions, sorted.

    drafts: with the drafter's variants. gpus: the variants of one rank of so many, and of sums over the ranks. Raises
    DoesNotDivide, a ValueError, if so many GPUs cannot share the model evenly.
    """
    found: dict[Variant, None] = {}
    for precision in precisions:
        model, cache = without_memory(config, precision, drafter=drafts > 0, gpus=gpus)
        with asked_variants(arch) as asked:
            for _ in passes(model, cache, drafts):
                pass
            if gpus in RANKS:
                compiled_sums(gpus)
        found |= asked
    return sorted(with_all_tiles(found), key=repr)


def with_all_tiles(variants: Iterable[Variant]) -> set[Variant]:
    """Return these and those that differ from one of them only in a tile that follows from the number of rows."""
    return {other for variant in variants for other in (variant, *_other_tiles(variant))}


def _other_tiles(variant: Variant) -> Iterator[Variant]:
    place = TILES.get(variant.function)
    if place is None:
        return
    module, given = importlib.import_module(variant.module), variant.arguments
    signature = inspect.signature(getattr(module, variant.function))

    def others(arguments: tuple) -> tuple:
        """Return the arguments except the tile. Arguments that are not given have their defaults."""
        bound = signature.bind(*arguments)
        bound.apply_defaults()
        return bound.args[:place] + bound.args[place + 1 :]

    for function, arguments in module.shipped_variants():
        if function.__name__ == variant.function and others(arguments) == others(given):
            yield variant._replace(arguments=(*given[:place], arguments[place], *given[place + 1 :]))
