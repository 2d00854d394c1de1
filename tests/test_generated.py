"""What is made from the code is what the code makes today."""

import pytest

import dsa
from dsa import reference
from tests import generate, public_names
from tests.gpu import headlines, status_table

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


@pytest.mark.parametrize("document", [status_table, headlines], ids=["status", "headlines"])
def test_tables(document):
    text = document.PATH.read_text()
    assert document.inserted(text) == text, STALE


def test_every_public_function_says_what_it_computes():
    for name in dsa.__all__:
        assert (getattr(dsa, name).__doc__ or "").strip(), name
