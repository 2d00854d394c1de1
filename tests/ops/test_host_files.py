"""The number of files that an engineer must read to follow a call from Python to its kernel."""

import sys
from pathlib import Path

import torch

import dsa
from dsa.cases import cases_of
from dsa.runtime.asked_variants import asked_variants
from dsa.runtime.op import forget_calls

PACKAGE = Path(dsa.__file__).parent
STAND_IN = "runtime/asked_variants.py"  # the test's replacement for a GPU


def entered(call):
    """Return the files of dsa whose functions run in a call, except the files of kernels."""
    found = set()

    def note(frame, event, argument):
        path = Path(frame.f_code.co_filename)
        if event == "call" and frame.f_code.co_name != "<module>" and path.is_relative_to(PACKAGE):
            found.add(str(path.relative_to(PACKAGE)))

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return {path for path in found if not path.startswith(("kernels/", "cute/"))} - {STAND_IN}


def test_the_first_call_of_sparse_prefill_enters_eight_files():
    case = cases_of("flash_mla_sparse_fwd")[0]
    given, function = case.arguments(heads=128), case.function()
    given = {name: x.to("meta") if isinstance(x, torch.Tensor) else x for name, x in given.items()}
    with asked_variants("sm_90") as asked:
        function(**given)  # the first call also imports modules, whose functions must not count
        forget_calls()
        files = entered(lambda: function(**given))
    assert {variant.function for variant in asked} == {"compile_sparse_mla"}
    ops = {"ops/mla/flash_mla_sparse_fwd.py", "ops/mla/_sparse_attention.py"}
    runtime = ("arguments", "backends", "checks", "compile_cache", "op", "recorded_calls")
    assert files == ops | {f"runtime/{name}.py" for name in runtime}
