"""The kernels that passes of models on several GPUs ask for, compiled before any rank starts: one after the other, in
each rank, they would take most of its time."""

import os
from collections.abc import Callable, Collection, Sequence

from dsa.runtime.asked_variants import asked_variants
from dsa.runtime.private_files import private_folder
from dsa.runtime.variants import Variant
from dsa_bench.e2e.parallel_cases import CONTEXT, Case, chosen
from dsa_bench.e2e.report import CHUNK
from dsa_bench.e2e.silent import SilentRanks, without_collectives
from dsa_bench.e2e.stacks import skeleton
from dsa_layers.compilation.build import build
from dsa_layers.compilation.passes import META, decode, prefill
from dsa_layers.compilation.variants import with_all_tiles
from dsa_layers.layers import joint_linear
from dsa_layers.parallel.ranks import ALONE, Ranks
from dsa_layers.parallel.split import split


def asked(models: Sequence[str], runs: Collection[str] | None, gpus: int, arch: str = "sm_90") -> list[Variant]:
    """What passes of the models ask for, split over so many GPUs and on one; sorted."""
    found: dict[Variant, None] = {}
    for name in models:
        todo = chosen(name, runs, lambda case: False)
        for ranks in (SilentRanks(0, gpus), ALONE) if todo else ():
            found |= _of_part(name, ranks, todo, arch)
    return sorted(with_all_tiles(found), key=repr)


def prepare(models: Sequence[str], runs: Collection[str] | None, gpus: int, tell: Callable[[str], None]) -> None:
    """Compiles these into the compile cache, if there is one, where they are not there yet."""
    compile_ahead(lambda: asked(models, runs, gpus), tell)


def compile_ahead(asked: Callable[[], list[Variant]], tell: Callable[[str], None]) -> None:
    """Compiles what is asked for into the compile cache, if there is one, where it is not there yet."""
    from dsa.runtime.compile_cache import cache_dir  # needs the DSL, which is for Linux

    directory = cache_dir()
    if directory is None:
        return  # each process compiles for itself
    variants = asked()
    new = sum(is_new for _, is_new in build(variants, private_folder(directory), len(os.sched_getaffinity(0))))
    tell(f"{new} kernels compiled, {len(variants) - new} were there")


def _of_part(name: str, ranks: Ranks, todo: Sequence[Case], arch: str) -> dict[Variant, None]:
    """Of a rank's part of the few layers that have all kinds."""
    model = skeleton(name)
    split(model, ranks, blocks=True)
    model.init_buffers(META)
    joint_linear.join(model)
    pages = -(-max(case.held for case in todo) // model.page_size)
    cache = model.eval().make_cache(pages, model.page_size, META, state_slots=1024)
    with asked_variants(arch) as found, without_collectives(model, ranks):
        for case in todo:
            if case.name.startswith("decode"):
                decode(model, cache, case.tokens, CONTEXT)
                continue
            # The last passes of a long prompt are alike.
            for begin in {*range(0, min(case.tokens, 8 * CHUNK), CHUNK), max(case.tokens - CHUNK, 0)}:
                prefill(model, cache, [(min(CHUNK, case.tokens - begin), begin)])
    return dict(found)
