"""Check that decoding passes with recorded calls of ops (dsa/runtime/recorded_calls.py) launch the same kernels, with
the same arguments, as the first pass. For 0 to 3 drafts, `main` prints each pass that differs, and the numbers of
launches and of recorded ops. It replaces the compiler in its process, so tests run it in a subprocess."""

import contextlib
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from dsa.runtime import backends, compile_cache
from dsa.runtime.op import OPS, forget_calls
from dsa.runtime.recorded_calls import REPEATS
from dsa_layers.cache.drafts import DRAFTS
from dsa_layers.generation.steps import DecodeStep
from dsa_layers.io.loading import load_model
from dsa_layers.models.family import read_config
from tests.layers.generation.families import has_drafter
from tests.ops.launched_arguments import Memory


@torch.inference_mode()
def main(checkpoint: str) -> None:
    launched, memory = [], [Memory()]

    def compile_for(target: str, kernel: Any, *fakes: Any) -> Callable[..., None]:
        return lambda *arguments: launched.append((type(kernel).__name__, memory[0].described(arguments)))

    compile_cache.compile_for = compile_for
    compile_cache._load_or_compile = lambda function, arguments: function(*arguments)
    backends.runs_kernel = lambda *_: True
    backends.arch_of = lambda _: "sm_90"
    backends.on_device = lambda _: contextlib.nullcontext()
    drafter = has_drafter(read_config(checkpoint).model_type)
    model = load_model(checkpoint, dtype=torch.bfloat16, drafter=drafter, progress=False)
    for drafts in range(DRAFTS + 1):
        forget_calls()
        cache = model.make_cache(16, model.page_size, "cpu", state_slots=6)
        step = DecodeStep(model, cache, drafts=drafts, capture=False)
        sequences = [
            SimpleNamespace(tokens=[5] * tokens, drafts=[7] * drafts, pages=pages, state_slot=pages[0])
            for tokens, pages in ((174, [3, 6, 7]), (20, [4]))
        ]
        first = None
        for i in range(REPEATS + 2):
            launched.clear()
            memory[0] = Memory()
            step(sequences)
            first = first or list(launched)
            for (name, own), (other_name, other) in zip(first, launched):
                if (name, own) != (other_name, other):
                    print(f"{drafts} drafts, pass {i + 1}: {other_name} launched otherwise than {name}")
                    break
            if len(first) != len(launched):
                print(f"{drafts} drafts, pass {i + 1}: {len(launched)} kernels for {len(first)}")
        recorded = sum(bool(op.known.steps) for op in OPS.values())
        print(f"{drafts} drafts: {len(first)} launches, {recorded} ops recorded")


if __name__ == "__main__":
    main(sys.argv[1])
