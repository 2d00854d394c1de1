"""Every kernel is launched programmatically: it waits for those in front before it touches global memory, and lets the
next one in behind that."""

import ast
from pathlib import Path

import pytest

import dsa.kernels
from dsa.runtime.compile_cache import cubin
from dsa.runtime.sass import instructions_in_order
from tests.kernels.variants import all_compile_functions, shipped

WAIT, LET_IN = "ACQBULK", "PREEXIT"
# Loads, stores, sums and copies, by threads, in bulk and by TMA; generic ones, too. Not prefetches to the L2 cache.
MEMORY = {"LDG", "STG", "ATOMG", "REDG", "LD", "ST", "ATOM", "RED", "LDGSTS"}
MEMORY |= {"UBLKCP", "UBLKRED", "UTMALDG", "UTMASTG", "UTMAREDG"}
IN_ORDER = sorted(all_compile_functions(), key=lambda function: (function.__module__, function.__name__))


@shipped(*IN_ORDER)
def test_no_kernel_touches_global_memory_before_its_wait(compile_function, arguments):
    kernels = instructions_in_order(cubin(compile_function, *arguments))
    assert kernels
    for instructions in kernels:
        assert instructions.count(WAIT) == instructions.count(LET_IN) == 1
        wait, let_in = instructions.index(WAIT), instructions.index(LET_IN)
        assert not MEMORY & set(instructions[:wait]) and MEMORY & set(instructions[wait:])
        # No thread ends or goes another way before it lets the next kernel in.
        assert wait < let_in and "EXIT" not in instructions[:let_in]


def _launches():
    for path in sorted(Path(dsa.kernels.__path__[0]).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and "grid" in {keyword.arg for keyword in node.keywords}:
                yield pytest.param(node, id=f"{path.name}:{node.lineno}")


@pytest.mark.parametrize("launch", list(_launches()))
def test_every_launch_is_programmatic(launch):
    (use_pdl,) = [keyword.value for keyword in launch.keywords if keyword.arg == "use_pdl"]
    assert isinstance(use_pdl, ast.Constant) and use_pdl.value is True
