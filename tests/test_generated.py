"""Generated files are up to date with the code."""

import re

import pytest

import dsa
from dsa import reference
from dsa.ops import op_modules
from dsa_bench.harness.benchmarks import benchmarks
from tests import generate, public_names
from tests.gpu import markdown, receipt, status_table, tables

STALE = "run `python -m tests.generate`"


def test_public_names():
    assert generate.INIT.read_text() == generate.init(), STALE
    bridges = {name for names in public_names.public_names().values() for name in names}
    assert set(dsa.__all__) == {*public_names.BACKENDS, *bridges}


def test_references():
    assert generate.REFERENCES.read_text() == generate.reference_init(), STALE
    assert public_names.all_ops() <= set(reference.__all__)


def test_api_pages():
    pages = {path: path.read_text() for path in generate.OPS.glob("*.md")}
    assert pages == generate.ops() and generate.LAYERS.read_text() == generate.layers(), STALE


@pytest.mark.parametrize("page", tables.PAGES, ids=lambda page: page.name)
def test_tables(page):
    text = page.read_text()
    assert tables.inserted(text) == text, STALE


def test_every_table_has_a_page():
    places = [name for page in tables.PAGES for name in markdown.names(page.read_text())]
    assert sorted(places) == sorted(tables.TABLES)


def test_rows_of_the_status_table_begin_with_names_that_commands_take():
    names = re.findall(r"^\| `(\w+)`(?:: `\w+`|[ ,])", status_table.PATH.read_text(), re.M)
    assert {*names} <= {*receipt.tested()} and {*op_modules()} <= {*names} and {*op_modules()} <= {*benchmarks()}
    assert "\n| `expert_routing`: `moe_gate`, `sort_by_expert` | kernel |" in status_table.PATH.read_text()


def test_every_public_function_says_what_it_computes():
    for name in dsa.__all__:
        assert (getattr(dsa, name).__doc__ or "").strip(), name
