"""Machine code is compared without the names that the source gives it."""

import re

import pytest

from dsa.kernels.mla import window_indices_sm90 as kernels
from dsa.runtime.compile_cache import cubin
from dsa.runtime.sass import disassemble
from tests.kernels import machine_code


@pytest.fixture(scope="module")
def code() -> bytes:
    compile_function, arguments = kernels.shipped_variants()[0]
    return cubin(compile_function, *arguments)


def _instructions(code: bytes) -> int:
    """Where they begin."""
    (content,) = (content for kind, _, content in machine_code.code_sections(code) if kind == ".text.")
    return code.index(content)


def test_symbols_do_not_count(code):
    (symbol,) = set(re.findall(rb"\.text\.(\w+)", code))
    renamed = code.replace(symbol, symbol[::-1])
    assert renamed != code and machine_code.digest(renamed) == machine_code.digest(code)


def test_an_instruction_counts(code):
    at = _instructions(code) + 64
    changed = code[:at] + bytes([code[at] ^ 1]) + code[at + 1 :]
    assert machine_code.digest(changed) != machine_code.digest(code)


def test_registers_are_those_of_the_kernel(code):
    assert list(machine_code.registers(code)) == [disassemble(code).registers]


def test_what_is_renamed_changed_gone_and_new():
    before = {"same": "1", "old name": "2", "changed": "3", "gone": "4"}
    after = {"same": "1", "new name": "2", "changed": "5", "added": "6"}
    gone, new, renamed = machine_code.differences(before, after)
    assert (gone, new, renamed) == (["changed", "gone"], ["added", "changed"], ["old name -> new name"])


def test_two_names_of_one_code_are_two():
    assert machine_code.differences({"a": "1", "b": "1"}, {"c": "1"}) == (["b"], [], ["a -> c"])
