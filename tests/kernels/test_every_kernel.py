"""Properties of every shipped kernel. It does not spill, and the registers of a CTA fit an SM. It supports programmatic
dependent launch: it waits for the previous kernel before it first accesses global memory, and triggers the next launch
after this wait."""

import ast
from pathlib import Path

import pytest

import dsa.kernels
from dsa.runtime.compile_cache import cubin
from tests.kernels import machine_code
from tests.kernels.variants import all_compile_functions, shipped

WAIT, RELEASE = "ACQBULK", "PREEXIT"
# Instructions that access global memory. LD, ST, ATOM and RED have generic addresses, which can be in global memory.
# Prefetches to L2 are not included, because a kernel may issue them before its wait.
MEMORY = {"LDG", "STG", "ATOMG", "REDG", "LD", "ST", "ATOM", "RED", "LDGSTS"}
MEMORY |= {"UBLKCP", "UBLKRED", "UTMALDG", "UTMASTG", "UTMAREDG"}
SORTED = sorted(all_compile_functions(), key=lambda function: (function.__module__, function.__name__))


@shipped(*SORTED)
def test_no_kernel_spills(sass):
    assert sass.stack == 0 and not sass.instructions["STL"] and not sass.instructions["LDL"]


@shipped(*SORTED)
def test_the_registers_of_a_cta_fit_an_sm(compile_function, arguments):
    code = cubin(compile_function, *arguments)
    assert max(machine_code.registers(code)) * max(machine_code.threads(code)) <= 65536


@shipped(*SORTED)
def test_no_kernel_touches_global_memory_before_its_wait(in_order):
    assert in_order
    for instructions in in_order:
        assert instructions.count(WAIT) == instructions.count(RELEASE) == 1
        wait, release = instructions.index(WAIT), instructions.index(RELEASE)
        assert not MEMORY & set(instructions[:wait]) and MEMORY & set(instructions[wait:])
        # Every thread executes the release: none exits before it.
        assert wait < release and "EXIT" not in instructions[:release]


def _launches():
    for path in sorted(Path(dsa.kernels.__path__[0]).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and "grid" in {keyword.arg for keyword in node.keywords}:
                yield pytest.param(node, id=f"{path.name}:{node.lineno}")


@pytest.mark.parametrize("launch", list(_launches()))
def test_every_launch_is_programmatic(launch):
    (use_pdl,) = [keyword.value for keyword in launch.keywords if keyword.arg == "use_pdl"]
    assert isinstance(use_pdl, ast.Constant) and use_pdl.value is True
