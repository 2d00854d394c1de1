"""Batch invariance: a token's results have the same bits whatever other sequences are in the pass.

In a matrix product of `dsa`, the bits of a row do not depend on other rows. Four other things depend on the batch:
- PyTorch's libraries choose the order of a sum by the number of rows;
- the routing op for few tokens sums the logits in another order than the product for many tokens;
- sparse attention uses split-KV for few queries, and shares keys between queries with neighbouring slots;
- the choice between dense and sparse attention depends on the longest sequence.
In decoding passes within `batch_invariant`, layers use the variants that work for any number of tokens. A pass over
one prompt always has the same tokens; only the slots of the prompt's keys may differ.
`check_invariant` in `dsa_layers/generation/engine_options.py` checks whether a model supports batch invariance.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal

_PASS: ContextVar[str | None] = ContextVar("batch_invariant", default=None)


@contextmanager
def batch_invariant(kind: Literal["decoding", "prompt"] | None) -> Iterator[None]:
    """Make the passes inside the `with` block batch-invariant.

    kind: "decoding" for decoding passes, "prompt" for passes over one prompt, None to disable batch invariance.
    """
    token = _PASS.set(kind)
    try:
        yield
    finally:
        _PASS.reset(token)


def is_batch_invariant() -> bool:
    """Return whether this pass is batch-invariant."""
    return _PASS.get() is not None


def of_attention() -> dict[str, bool]:
    """Return the keyword arguments that batch invariance adds to a call of an attention op.

    The dict is empty without batch invariance, so a replacement of an op need not accept `enable_batch_invariant`.
    """
    return {"enable_batch_invariant": True} if is_batch_invariant() else {}


def has_any_rows() -> bool:
    """Return whether this is a batch-invariant decoding pass. Its batch may have any number of rows."""
    return _PASS.get() == "decoding"
