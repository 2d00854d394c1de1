"""Passes in which what a token gets depends on no other sequence, bit for bit, nor on how many tokens there are.

Kernels of products give a row the same bits whatever is multiplied beside it. Four things do not: PyTorch's libraries,
which choose the order of a sum by the number of rows; routing of few tokens in one op, which sums logits otherwise than
the product for many; sparse attention, which splits queries' keys where there are few queries, and shares keys between
queries by the slots that they have; and the choice between dense and sparse attention, which goes by the longest
sequence. In decoding passes within `batch_invariant` layers take the ways that there are for any number of tokens. A
pass over one prompt alone has as many tokens as ever, and only its keys' places may differ.
`dsa_layers/generation/engine_options.py` says of which models.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal

_PASS: ContextVar[str | None] = ContextVar("batch_invariant", default=None)


@contextmanager
def batch_invariant(kind: Literal["decoding", "prompt"] | None) -> Iterator[None]:
    """What the pass inside is: over the last tokens of any sequences, or of one prompt alone; None: any, and not
    batch-invariant."""
    token = _PASS.set(kind)
    try:
        yield
    finally:
        _PASS.reset(token)


def is_batch_invariant() -> bool:
    """Whether the pass is batch-invariant, of either kind."""
    return _PASS.get() is not None


def of_attention() -> dict[str, bool]:
    """What attention is told of it: nothing where it is as ever, so that what others put in its place need not know."""
    return {"enable_batch_invariant": True} if is_batch_invariant() else {}


def has_any_rows() -> bool:
    """Whether it is one in which rows may have any others beside them."""
    return _PASS.get() == "decoding"
