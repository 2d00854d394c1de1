"""What is made from the code is what the code makes today."""

import re

import pytest

import dsa
from dsa import reference
from dsa.ops import op_modules
from dsa_bench.harness.benchmarks import benchmarks
from tests import generate, public_names
from tests.gpu import headlines, receipt, status_table, training_tables

STALE = "run `python -m tests.generate`"


def test_public_names():
    assert generate.INIT.read_text() == generate.init(), STALE
    bridges = {name for names in public_names.public_names().values() for name in names}
    assert set(dsa.__all__) == {*public_names.BACKENDS, *bridges}


def test_references():
    """Every op has one that dsa.reference gives."""
    assert generate.REFERENCES.read_text() == generate.reference_init(), STALE
    assert public_names.all_ops() <= set(reference.__all__)


def test_ops_page():
    assert generate.OPS.read_text() == generate.ops(), STALE


@pytest.mark.parametrize(
    "document", [status_table, headlines, training_tables], ids=["status", "headlines", "training"]
)
def test_tables(document):
    text = document.PATH.read_text()
    assert document.inserted(text) == text, STALE


def test_rows_of_the_status_table_begin_with_names_that_commands_take():
    names = re.findall(r"^\| `(\w+)`(?:: `\w+`|[ ,])", status_table.PATH.read_text(), re.M)
    assert {*names} <= {*receipt.tested()} and {*op_modules()} <= {*names} and {*op_modules()} <= {*benchmarks()}
    assert "\n| `expert_routing`: `moe_gate`, `sort_by_expert` | kernel |" in status_table.PATH.read_text()


def test_every_public_function_says_what_it_computes():
    for name in dsa.__all__:
        assert (getattr(dsa, name).__doc__ or "").strip(), name


def test_costs_of_training_leave_out_what_was_not_measured():
    """A pass, a peer and a yardstick's ratio; a target has its rows together, "sum" first."""

    def row(shape, ms, fa2, figure="1 TFLOP/s, 1.50 of the inputs' memory"):
        return {"shape": shape, "ms": ms, "figure": figure, "yardsticks": {"FA2": {"ms": fa2}}}

    model = "64 heads of 128/128, 1 of keys, index 64 x 64"
    rows = [row(f"forward, per_head, 4 x 2048, {model}", 1.0, 0.5), row(f"forward, sum, 4 x 2048, {model}", 1.2, 0.8)]
    rows += [
        row(f"backward, sum, 4 x 2048, {model}", 0.15052, 115.6, ""),
        row(f"forward, sum, 64 x 2048, {model}", 20, 10),
    ]
    assert training_tables.warmup(rows).splitlines()[2:] == [
        f"| sum, {model} | 8K | 1.20 | 0.800 | 1.50 | 0.151 |  | 116 | 1.50 |",
        f"| sum, {model} | 128K | 20.0 | 10.0 | 2.00 |  |  |  | 1.50 |",
        f"| per_head, {model} | 8K | 1.00 | 0.500 | 2.00 |  |  |  | 1.50 |",
    ]
    alone = {"shape": "8192 queries", "ms": 3.0, "figure": "1 TFLOP/s", "ratio": None, "peer_ms": None}
    assert training_tables.attention([alone]).endswith("\n| 8192 queries | 3.00 | 1 TFLOP/s |  |  |")
    losses = [row("forward, 8192 queries, d 512", 1, 2), row("deterministic backward, 8192 queries, d 512", 4, 2)]
    assert training_tables.loss(losses).endswith("\n| 8192 queries, d 512 | 1.00 | 0.50 |  |  | 4.00 | 2.00 |")
    why = "Nothing is measured on this code: no entry."
    assert training_tables.generated(training_tables.LOSS, {"unverified": "no entry"}) == why
