"""What is made from the code is what the code makes today."""

import dsa
from tests import generate
from tests.gpu import status_table

STALE = "run `python -m tests.generate`"


def test_public_names():
    assert generate.INIT.read_text() == generate.init(), STALE
    assert set(dsa.__all__) == {*generate.BACKENDS, *(n for names in generate.public_names().values() for n in names)}


def test_ops_page():
    assert generate.OPS.read_text() == generate.ops(), STALE


def test_status_tables():
    text = status_table.DOCUMENT.read_text()
    assert status_table.inserted(text) == text, STALE


def test_every_public_function_says_what_it_computes():
    for name in dsa.__all__:
        assert (getattr(dsa, name).__doc__ or "").strip(), name
