"""If an op's kernels do not accept an argument, the op raises an error that names it before any launch."""

import math

import pytest
import torch

from dsa.cases import CASES
from dsa.runtime.arguments import POSITIVE, REST, ROW_COUNT, Sizes, Tensor, Word
from dsa.runtime.op import OPS, Op
from tests.ops.limits import LIMITS

BY_NAME = {call.name: call for call in CASES}
DECLARED = [(name, word, accepted) for name, op in OPS.items() for word, accepted in op.limits.limits]


def beyond(accepted):
    """Return the size closest to the accepted sizes that is not accepted."""
    if accepted is POSITIVE:
        return 0.0
    if isinstance(accepted, tuple):
        return max(accepted) + 1
    if accepted.of > 1:
        return accepted.least + 1
    return accepted.most + 1 if accepted.most != math.inf else accepted.least - 1


def with_size(shapes, x, before, after):
    """Return a meta tensor with the dtype of x and other sizes. before, after: the sizes of the call by name."""
    shape = next(one for one in shapes.shapes if len(shapes.shapes) == 1 or one.fits(x.shape, before))
    middle = after[REST] if shape.open else ()
    front, back = ([round(word.size(after)) for word in words] for words in (shape.front, shape.back))
    return torch.empty(*front, *middle, *back, dtype=x.dtype, device="meta")


def resized(op, values, changes):
    before = op.arguments.check(*values)
    after = Sizes()
    # Keep the sizes of names, from which the sizes of formulas are computed. Keep a formula's size if one of the
    # formula's names has no size, such as R in "R/2".
    after.update({text: n for text, n in before.items() if text.isidentifier() or not {*Word(text).names} <= {*before}})
    after[REST] = before.get(REST)
    after.update(changes)
    if ROW_COUNT in changes:
        after[REST] = (changes[ROW_COUNT],)
    for (name, spec), value in zip(op.arguments.specs.items(), values):
        shapes = op.arguments.shapes.get(name)
        if value is None or shapes is None:
            yield changes.get(name, value)
        elif isinstance(spec, Tensor):
            yield with_size(shapes, value, before, after)
        else:
            yield [with_size(shapes, value[0], before, after)] * changes.get(spec.count, len(value))


@pytest.fixture(scope="module")
def checked():
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Op, "run", lambda op, *values: found.setdefault(op.name, values) and op._run_reference(values))
        for case in CASES:
            case.run(case.arguments())
    return found


@pytest.mark.parametrize(("name", "word", "accepted"), DECLARED, ids=[f"{n}-{w.text}" for n, w, _ in DECLARED])
def test_a_size_outside_a_declared_limit_is_refused(name, word, accepted, checked):
    op = OPS[name]
    first, *others = word.names
    sizes = op.arguments.check(*checked[name])
    size = beyond(accepted)
    if others:
        size = -(-size // math.prod(sizes[other] for other in others))
    bad = resized(op, checked[name], {word.text if word.text in sizes else first: size})
    with pytest.raises(ValueError, match=r"^[\w\[\], ]+: "):
        op._check_all(tuple(bad))


@pytest.mark.parametrize(("name", "changes", "message"), LIMITS, ids=[f"{name}-{text}" for name, _, text in LIMITS])
def test_what_an_op_does_not_take_is_refused_by_name(name, changes, message, launches):
    arguments = BY_NAME[name].arguments()
    launches.clear()  # making the arguments can launch kernels
    with pytest.raises((TypeError, ValueError), match=message):
        BY_NAME[name].run(arguments | changes(arguments))
    assert not launches
