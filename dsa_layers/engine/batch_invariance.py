"""Batch invariance: a token's results have the same bits whatever other sequences are in the pass.

In a product of `dsa`, the bits of a row do not depend on other rows. Four other things depend on the number of tokens:
- PyTorch's libraries choose the order of a sum by the number of rows;
- routing of few tokens in one op sums the logits in another order than the product for many tokens;
- sparse attention splits the keys of few queries, and shares keys between queries that have neighbouring slots;
- the choice between dense and sparse attention depends on the longest sequence.
In decoding passes within `batch_invariant`, layers take the variants that work for any number of tokens. A pass over
one prompt always has the same tokens, and only the slots of its keys may differ.
`dsa_layers/generation/engine_options.py` lists the models.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal

_PASS: ContextVar[str | None] = ContextVar("batch_invariant", default=None)


@contextmanager
def batch_invariant(kind: Literal["decoding", "prompt"] | None) -> Iterator[None]:
    """Passes inside are batch-invariant: decoding passes, or passes over one prompt. None: they are not."""
    token = _PASS.set(kind)
    try:
        yield
    finally:
        _PASS.reset(token)


def is_batch_invariant() -> bool:
    """Whether this pass is batch-invariant."""
    return _PASS.get() is not None


def of_attention() -> dict[str, bool]:
    """Return the keyword arguments for attention ops. There are none without batch invariance, so a replacement of an
    op need not accept `enable_batch_invariant`."""
    return {"enable_batch_invariant": True} if is_batch_invariant() else {}


def has_any_rows() -> bool:
    """Whether this is a batch-invariant decoding pass, in which a row may be among any number of other rows."""
    return _PASS.get() == "decoding"
