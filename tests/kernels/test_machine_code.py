"""Digests of machine code depend on the code and not on names, and the kernels' machine code equals the record
(machine_code.json)."""

import re

import cutlass
import cutlass.cute as cute
import pytest

from dsa.kernels.mla import window_indices_sm90 as kernels
from dsa.runtime import compile_cache
from dsa.runtime.compile_cache import compile_sm90, object_file
from dsa.runtime.object_file import cubin_in, write_object_file
from dsa.runtime.sass import disassemble
from tests.code_lines import code_lines
from tests.kernels import machine_code

RENEW = "run `python -m tests.kernels.machine_code`"


@pytest.fixture(scope="module")
def code() -> bytes:
    compile_function, arguments = kernels.shipped_variants()[0]
    return object_file(compile_function, *arguments)


@cute.kernel
def _fill_kernel(x: cute.Tensor, value: cutlass.Constexpr):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    x[block, thread] = value


@cute.jit
def _fill(x: cute.Tensor, rows: cutlass.Constexpr, value: cutlass.Constexpr, stream):
    _fill_kernel(x, value).launch(grid=(rows, 1, 1), block=(32, 1, 1), stream=stream)


@cute.kernel
def _fill_kernel_with_other_names(out: cute.Tensor, number: cutlass.Constexpr):
    lane, _, _ = cute.arch.thread_idx()
    row, _, _ = cute.arch.block_idx()
    out[row, lane] = number


@cute.jit
def _fill_with_other_names(out: cute.Tensor, count: cutlass.Constexpr, number: cutlass.Constexpr, stream):
    _fill_kernel_with_other_names(out, number).launch(grid=(count, 1, 1), block=(32, 1, 1), stream=stream)


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    """Return a function (launching function, rows, value) -> object file. The kernel fills `rows` rows of 32 columns
    with `value`. For `_fill_twice`, `rows` is the order of the launches."""
    path = tmp_path_factory.mktemp("filled") / "object.o"

    def compiled(function, rows, value):
        x = cute.runtime.make_fake_tensor(cutlass.Float32, (64, 32), (32, 1), assumed_align=16)
        stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
        write_object_file(compile_sm90(function, x, rows, value, stream), path, "entry")
        return path.read_bytes()

    return compiled


@cute.jit
def _fill_twice(x: cute.Tensor, order: cutlass.Constexpr, value: cutlass.Constexpr, stream):
    for kind in cutlass.range_constexpr(len(order)):
        _fill_kernel(x, value + order[kind]).launch(grid=(3, 1, 1), block=(32, 1, 1), stream=stream)


@pytest.mark.parametrize(
    ("count", "calls"),
    [
        (1, [(_fill, 3, 1.0), (_fill_with_other_names, 3, 1.0)]),  # other names in the source
        (3, [(_fill, 3, 1.0), (_fill, 3, 2.0), (_fill, 4, 1.0)]),  # another constant, another grid
        (4, [(_fill_twice, order, 1.0) for order in ((0, 1), (1, 0), (0, 1, 0), (0, 1, 1))]),
    ],
)
def test_digests_differ_by_code_constants_grids_and_order_only(filled, count, calls):
    assert len({machine_code.digest(filled(*call)) for call in calls}) == count


def test_the_grid_is_in_the_host_code(filled):
    first, second = (tuple(machine_code.code_sections(cubin_in(filled(_fill, rows, 1.0)))) for rows in (3, 4))
    assert first == second


def test_symbols_do_not_count(code):
    (symbol,) = set(re.findall(rb"\.text\.(\w+)", code))
    renamed = code.replace(symbol, symbol[::-1])
    assert renamed != code and machine_code.digest(renamed) == machine_code.digest(code)


def test_an_instruction_counts(code):
    (content,) = (content for kind, _, content in machine_code.code_sections(cubin_in(code)) if kind == ".text.")
    at = code.index(content) + 64
    changed = code[:at] + bytes([code[at] ^ 1]) + code[at + 1 :]
    assert machine_code.digest(changed) != machine_code.digest(code)


def test_registers_are_those_of_the_kernel(code):
    assert list(machine_code.registers(cubin_in(code))) == [disassemble(cubin_in(code)).registers]


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (
            {"same": "1", "old name": "2", "changed": "3", "gone": "4"},
            {"same": "1", "new name": "2", "changed": "5", "added": "6"},
            (["changed", "gone"], ["added", "changed"], ["old name -> new name"]),
        ),
        # Two variants that exchange their code count as changed.
        ({"a": "1", "b": "2"}, {"a": "2", "b": "1"}, (["a", "b"], ["a", "b"], [])),
        # Of two old names with the code of one new name, only one counts as renamed.
        ({"a": "1", "b": "1"}, {"c": "1"}, (["b"], [], ["a -> c"])),
    ],
)
def test_variants_are_gone_new_or_renamed(before, after, expected):
    assert machine_code.differences(before, after) == expected


FUNCTION = 'def f(x):  # one\n    """Two.\n    """\n    # three\n    return f"{x} # four"\n'
NEXT_TO_STRINGS = [
    'class A(int): "doc"',
    '"""doc"""; x = 64',
    's = "\u2028"\nT = 64 + 64\nK = 1',
    's = """\n\n a \n"""',
]


@pytest.mark.parametrize(
    ("source", "code"),
    [
        (f'{FUNCTION}class A:\n    """Five."""\n    x = 1', 'def f(x):\n    return f"{x} # four"\nclass A:\n    x = 1'),
        *((source, source) for source in (*NEXT_TO_STRINGS, "\fx = 1\ny = 2")),
    ],
)
def test_only_comments_and_docstrings_do_not_count_in_a_source(source, code):
    assert "\n".join(code_lines(source)) == code


def test_the_compilers_options_count(monkeypatch):
    before = machine_code.changed_families()
    monkeypatch.setattr(compile_cache, "OPTIONS", f"{compile_cache.OPTIONS} --opt-level 1")
    assert before == [] and machine_code.changed_families() == machine_code.families()


def test_names_of_arguments_do_not_count():
    variant = "fp8_gemm_sm90.compile_fp8_gemm('bfloat16', Fp8GemmConfig(groups=2, tile=(64, 8)), True)"
    assert machine_code.without_names(variant) == "('bfloat16', (2, (64, 8)), True)"


def test_a_record_that_is_damaged_says_how_to_renew_it(tmp_path, monkeypatch):
    path = tmp_path / "machine_code.json"
    path.write_text('{"dsl": "4.8')
    monkeypatch.setattr(machine_code, "PATH", path)
    with pytest.raises(ValueError, match=r"machine_code.json: not JSON .*; delete it and write it anew with --all"):
        machine_code.recorded()


@pytest.mark.parametrize("family", machine_code.families())
def test_machine_code_is_that_on_record(family, request):
    """A family whose source has the recorded key is compiled only with --all."""
    there = machine_code.recorded()
    assert family in there["families"], RENEW
    own = there["families"][family]
    if own["key"] == machine_code.key_of(family):
        assert own["variants"].keys() == machine_code.shipped(family).keys(), RENEW
        if not request.config.getoption("all"):
            return
    if there["dsl"] != cutlass.__version__:
        pytest.skip(f"the record is of CuTe DSL {there['dsl']}")
    gone, new, _ = machine_code.differences(own["variants"], machine_code.compiled([family])[family])
    assert not gone and not new, RENEW
