"""What is made from the code is what the code makes today."""

import pytest

import dsa
from tests import generate
from tests.gpu import headlines, status_table

STALE = "run `python -m tests.generate`"


def test_public_names():
    assert generate.INIT.read_text() == generate.init(), STALE
    assert set(dsa.__all__) == {*generate.BACKENDS, *(n for names in generate.public_names().values() for n in names)}


def test_ops_page():
    assert generate.OPS.read_text() == generate.ops(), STALE


@pytest.mark.parametrize("document", [status_table, headlines], ids=["status", "headlines"])
def test_tables(document):
    text = document.PATH.read_text()
    assert document.inserted(text) == text, STALE


def test_every_public_function_says_what_it_computes():
    for name in dsa.__all__:
        assert (getattr(dsa, name).__doc__ or "").strip(), name
