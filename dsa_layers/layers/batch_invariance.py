"""Decoding passes in which what a token gets depends on no other token, bit for bit, nor on how many there are.

Kernels of products give a row the same bits whatever is multiplied beside it. Four things do not: PyTorch's libraries,
which choose the order of a sum by the number of rows; routing of few tokens in one op, which sums logits otherwise than
the product for many; sparse attention, which splits queries' keys where there are few queries; and the choice between
dense and sparse attention, which goes by the longest sequence. Within `batch_invariant` layers take the ways that there
are for any number of tokens. `dsa_layers/generation/invariant_models.py` says of which models.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_ACTIVE = ContextVar("batch_invariant", default=False)


@contextmanager
def batch_invariant(active: bool = True) -> Iterator[None]:
    """Decoding passes inside are batch-invariant, if `active`."""
    token = _ACTIVE.set(active)
    try:
        yield
    finally:
        _ACTIVE.reset(token)


def is_batch_invariant() -> bool:
    return _ACTIVE.get()
