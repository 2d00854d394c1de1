"""What changes a module's digest, and what does not: on small package trees, and on this project."""

import ast

import pytest

from dsa import source_digest as digests

ENTRY = "dsa.ops.entry"


def clear():
    cached = (
        digests._parsed,
        digests._of_arch,
        digests._tree,
        digests._module_text,
        digests.modules_used_by,
        digests.source_digest,
    )
    for function in (*cached, digests.functions_with_kernels):
        function.cache_clear()


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """Call it with {path: source}: it writes the files and returns the digest of `dsa.ops.entry`."""
    monkeypatch.setattr(digests, "_ROOT", tmp_path)

    def write(files):
        for name, source in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(source)
        clear()
        return digests.source_digest(ENTRY)

    yield write
    clear()


CODE = '''"""A module."""

LIMIT = 3


class Thing:
    """A class."""

    def scale(self, x):
        """A method."""
        return x * LIMIT


async def wait():
    """Only documented."""
'''

SAME = {
    "comment": CODE.replace("LIMIT = 3", "LIMIT = 3  # three"),
    "format": CODE.replace("x * LIMIT", "(\n            x *\n            LIMIT\n        )"),
    "module docstring": CODE.replace("A module.", "Another text."),
    "class docstring": CODE.replace('    """A class."""\n\n', ""),
    "method docstring": CODE.replace("A method.", "Other\n        lines."),
    "only a docstring": CODE.replace('"""Only documented."""', "pass"),
}

OTHER = {
    "number": CODE.replace("= 3", "= 4"),
    "type of a number": CODE.replace("= 3", "= 3.0"),
    "operator": CODE.replace("x * LIMIT", "x + LIMIT"),
    "name": CODE.replace("def scale", "def scaled"),
    "default": CODE.replace("(self, x)", "(self, x=None)"),
    "decorator": CODE.replace("    def scale(self, x)", "    @staticmethod\n    def scale(self, x)"),
    "string that is no docstring": CODE + 'TEXT = "A module."\n',
    "order": CODE.replace("LIMIT = 3\n", "") + "LIMIT = 3\n",
    "None returned": CODE + "def f():\n    return None\n",
}


@pytest.mark.parametrize("change", SAME)
def test_what_does_not_count(tree, change):
    assert SAME[change] != CODE
    assert tree({"dsa/ops/entry.py": SAME[change]}) == tree({"dsa/ops/entry.py": CODE})


def test_all_code_counts(tree):
    found = [tree({"dsa/ops/entry.py": source}) for source in (CODE, *OTHER.values())]
    assert len(set(found)) == len(found)


def test_empty_values_differ(tree):
    returns = ("None", "[]", "()", "''", "0", "False")
    assert len({tree({"dsa/ops/entry.py": f"def f():\n    return {value}\n"}) for value in returns}) == len(returns)


# Each reaches dsa/ops/other.py or dsa/reference/maths.py, to which a line is then added.
IMPORTS = {
    "import a.b": ("import dsa.ops.other\n", "dsa/ops/other.py"),
    "import a.b as c": ("import os, dsa.reference.maths as m\n", "dsa/reference/maths.py"),
    "from a import submodule": ("from dsa.reference import maths as reference\n", "dsa/reference/maths.py"),
    "from a.b import name": ("from dsa.ops.other import VALUE\n", "dsa/ops/other.py"),
    "from . import x": ("from . import other\n", "dsa/ops/other.py"),
    "from .x import name": ("from .other import VALUE\n", "dsa/ops/other.py"),
    "from .. import x": ("from .. import ops\n", "dsa/ops/__init__.py"),
    "from ..x import y": ("from ..ops import other\n", "dsa/ops/other.py"),
    "second name": ("from dsa.ops import unrelated, other\n", "dsa/ops/other.py"),
    "in a function": ("def f():\n    from dsa.ops.other import VALUE\n\n    return VALUE\n", "dsa/ops/other.py"),
    "in a branch": ("try:\n    import dsa.ops.other\nexcept ImportError:\n    pass\n", "dsa/ops/other.py"),
    "name of a package": ("from dsa.reference import exported\n", "dsa/reference/__init__.py"),
    "through a package": ("from dsa.reference import exported\n", "dsa/reference/maths.py"),
    "through a module": ("import dsa.ops.middle\n", "dsa/reference/maths.py"),
    "all names": ("from dsa.reference import *\n", "dsa/reference/maths.py"),
}

FILES = {
    "dsa/__init__.py": "",
    "dsa/ops/__init__.py": "VALUE = 1\n",
    "dsa/ops/other.py": "VALUE = 1\n",
    "dsa/ops/unrelated.py": "VALUE = 1\n",
    "dsa/ops/middle.py": "def f():\n    from dsa.reference import maths\n",
    "dsa/reference/__init__.py": "from .maths import VALUE as exported\n\nVALUE = 1\n",
    "dsa/reference/maths.py": "VALUE = 1\n",
}


@pytest.mark.parametrize(("entry", "path"), IMPORTS.values(), ids=IMPORTS)
def test_imported_code_counts(tree, entry, path):
    before = tree({**FILES, "dsa/ops/entry.py": entry})
    assert tree({path: FILES[path] + "# a comment\n"}) == before
    assert tree({path: FILES[path] + "MORE = 2\n"}) != before


def test_modules_that_are_not_imported_do_not_count(tree):
    before = tree({**FILES, "dsa/ops/entry.py": "import torch\nfrom dsa.ops import other\n"})
    assert digests.modules_used_by(ENTRY) == (ENTRY, "dsa.ops.other")
    assert (
        tree({"dsa/ops/unrelated.py": "VALUE = 2\n", "torch.py": "VALUE = 2\n", "dsa/reference/maths.py": ""}) == before
    )


def test_modules_that_import_each_other(tree):
    tree({"dsa/ops/entry.py": "from dsa.ops import other\n", "dsa/ops/other.py": "from dsa.ops import entry\n"})
    assert digests.modules_used_by(ENTRY) == digests.modules_used_by("dsa.ops.other") == (ENTRY, "dsa.ops.other")


def test_two_modules_with_the_same_code_differ(tree):
    tree({"dsa/ops/entry.py": CODE, "dsa/ops/other.py": CODE})
    assert digests.source_digest(ENTRY) != digests.source_digest("dsa.ops.other")


def test_nothing_is_imported(tree):
    tree({"dsa/ops/entry.py": "raise SystemExit('imported')\n"})


def test_every_version_of_python_gives_the_same_digest(tree, monkeypatch):
    """Later versions add fields to the syntax tree (3.12: the type parameters of functions), empty for our code."""
    before = tree({"dsa/ops/entry.py": CODE})
    parse = ast.parse

    def later_parse(source):
        parsed = parse(source)
        for node in ast.walk(parsed):
            node._fields = (*node._fields, "new_list", "new_option")
            node.new_list, node.new_option = [], None
        return parsed

    monkeypatch.setattr(ast, "parse", later_parse)
    assert tree({}) == before
    assert tree({"dsa/ops/entry.py": OTHER["number"]}) != before


@pytest.mark.parametrize(
    "module", ["dsa.ops.nothing", "torch", "dsa_layers.command.main", "dsa.ops.indexer.topk_indices.topk_indices"]
)
def test_unknown_modules_are_errors(module):
    with pytest.raises(ValueError, match=f"module: '{module}' is not a module of dsa"):
        digests.source_digest(module)


def test_an_op_has_a_kernel_if_it_reaches_one(tree):
    bridge = "def f():\n    import dsa.cute.helper\n"
    tree({"dsa/ops/entry.py": "", "dsa/ops/family/entry.py": bridge, "dsa/cute/helper.py": ""})
    assert not digests.has_kernel("entry")
    tree({"dsa/cute/helper.py": "from dsa.kernels import cast_sm90\n", "dsa/kernels/cast_sm90.py": ""})
    assert digests.has_kernel("entry")


FUNCTIONS = {
    "dsa/ops/entry.py": "from dsa.ops import other\nfrom dsa.ops.shared import launch\nfrom dsa import reference\n\n"
    "plain = reference.plain\n\ndef direct():\n    return _kernel()\n\ndef _kernel():\n"
    "    from dsa.kernels.cast_sm90 import compile_cast\n\n    return compile_cast\n\n"
    "def shared():\n    launch()\n\ndef through_a_module():\n    other.run()\n\ndef no_kernel():\n    plain()\n",
    "dsa/ops/shared.py": "def launch():\n    from dsa.kernels import cast_sm90 as kernels\n\n    kernels.run()\n",
    "dsa/ops/other.py": "from dsa.ops.shared import launch\n\ndef run():\n    launch()\n",
    "dsa/kernels/cast_sm90.py": "def compile_cast():\n    pass\n",
    "dsa/reference/__init__.py": "",
}


def test_which_functions_have_kernels(tree):
    tree({"dsa/ops/__init__.py": "", **FUNCTIONS})
    found = digests.functions_with_kernels(ENTRY)
    assert found == {"direct", "_kernel", "shared", "through_a_module"}


DECLARED = {
    "dsa/ops/__init__.py": "",
    "dsa/ops/entry.py": "from dsa.ops.declaration import op\n\n"
    '@op(kernels={"sm_90": "dsa.kernels.cast_sm90", "sm_100": ("dsa.kernels.cast_sm100", "dsa.kernels.sums_sm100")})\n'
    "def _cast(kernels):\n    pass\n\ndef cast():\n    return _cast()\n\ndef plain():\n    pass\n",
    "dsa/ops/declaration.py": "def op():\n    pass\n",
    "dsa/kernels/cast_sm90.py": "",
    "dsa/kernels/cast_sm100.py": "",
    "dsa/kernels/sums_sm100.py": "",
}


# The rows of a part of an op, which is no op itself.
OF_A_PART = {
    **DECLARED,
    "dsa/ops/entry.py": "from dsa.ops.part import launch\n\ndef cast():\n    launch()\n\ndef plain():\n    pass\n\n"
    "def _cast():\n    launch()\n",
    "dsa/ops/part.py": "from dsa.ops.declaration import Kernels\n\nKERNELS = Kernels(\n"
    '"cast", {"sm_90": "dsa.kernels.cast_sm90", "sm_100": ("dsa.kernels.cast_sm100", "dsa.kernels.sums_sm100")}\n)\n'
    "\ndef launch():\n    return KERNELS.modules()\n",
}


@pytest.mark.parametrize("files", [DECLARED, OF_A_PART], ids=["op", "part"])
def test_declared_kernels_are_those_of_their_arch(tree, files):
    tree(files)
    used = {arch: set(digests.modules_used_by(ENTRY, arch=arch)) for arch in ("", "sm_90", "sm_100", "sm_80")}
    assert {name for name in used["sm_90"] if ".kernels." in name} == {"dsa.kernels.cast_sm90"}
    assert {name for name in used["sm_100"] if ".kernels." in name} == {
        "dsa.kernels.cast_sm100",
        "dsa.kernels.sums_sm100",
    }
    assert used[""] == used["sm_90"] | used["sm_100"] and not [name for name in used["sm_80"] if ".kernels." in name]
    assert digests.functions_with_kernels(ENTRY) == digests.functions_with_kernels(ENTRY, "sm_90") == {"_cast", "cast"}
    assert not digests.functions_with_kernels(ENTRY, "sm_80")


@pytest.mark.parametrize(("files", "module"), [(DECLARED, "entry"), (OF_A_PART, "part")], ids=["op", "part"])
def test_another_archs_row_changes_no_digest(tree, files, module):
    tree(files)
    before = {arch: digests.digest_of([f"dsa.ops.{module}"], arch) for arch in ("", "sm_90", "sm_100")}
    path, row = f"dsa/ops/{module}.py", ', "sm_100": ("dsa.kernels.cast_sm100", "dsa.kernels.sums_sm100")'
    assert row in files[path]
    tree({path: files[path].replace(row, "")})
    after = {arch: digests.digest_of([f"dsa.ops.{module}"], arch) for arch in before}
    assert after["sm_90"] == before["sm_90"] and after["sm_100"] != before["sm_100"] and after[""] != before[""]


def test_other_dicts_are_no_rows():
    for source in ("{}", '{"sm_90": "Hopper"}', '{"a": "dsa.kernels.cast_sm90"}', "{**rows}", '["dsa.kernels.cast"]'):
        assert digests.rows_in(ast.parse(source, mode="eval").body) == {}, source
    rows = ast.parse('{"sm_90": ("dsa.kernels.cast_sm90", "dsa.kernels.config")}', mode="eval").body
    assert digests.rows_in(rows) == {"sm_90": ("dsa.kernels.cast_sm90", "dsa.kernels.config")}


def test_a_part_of_an_op_depends_on_its_kernels_and_on_no_others():
    """The modules of index scores: they are launched by parts of ops, which name their kernels themselves."""
    used = digests.modules_used_by("dsa.ops.training.indexer_topk", arch="sm_90")
    assert {"dsa.kernels.training.indexer_scores_sm90", "dsa.kernels.training.q_tile_plan_sm90"} <= set(used)
    assert not [name for name in used if "sparse_indexer" in name]
    # No arch but Hopper has kernels of these.
    found = digests.modules_used_by("dsa.ops.training.indexer_topk", arch="sm_100")
    assert not [name for name in found if digests.is_kernel(name)]
    assert "indexer_topk" in digests.functions_with_kernels("dsa.ops.training.indexer_topk", "sm_90")


def test_which_ops_have_kernels():
    assert digests.has_kernel("per_token_cast_to_fp8")
    assert digests.has_kernel("fp8_gemm_nt")
    with pytest.raises(ValueError, match=r"op: must be one of .*topk_indices.*, got 'nothing'"):
        digests.has_kernel("nothing")


def test_the_digest_of_an_op_covers_its_kernel_and_its_reference_and_no_other_op():
    used = set(digests.modules_used_by("dsa.ops.gemm.per_token_cast_to_fp8"))
    assert used >= {
        "dsa.ops.gemm.per_token_cast_to_fp8",
        "dsa.kernels.gemm.per_token_cast_to_fp8_sm90",
        "dsa.cute.compile_cache",
        "dsa.cute.fake_tensors",
        "dsa.backends",
        "dsa.reference.gemm.fp8_cast",
        "dsa.reference.gemm.hadamard",
    }
    assert used & set(digests.op_modules().values()) == {"dsa.ops.gemm.per_token_cast_to_fp8"}
    assert not used & {"dsa", "dsa.reference", "dsa.reference.indexer.topk_indices"}
