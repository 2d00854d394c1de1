"""Index tensors with hostile contents: whatever they hold, an op reads and writes inside its tensors, and the rows that
a wrong number does not concern have their right results.

The module of each family has ARGUMENTS, a list of `IndexArgument`: one for every index-like argument (cu_seqlens,
block tables, indices, slots, lengths, starts, plans, row numbers) of every public op of its families.
tests/ops/test_hostile_contents.py runs them on the references, tests/gpu/test_hostile_contents.py on the kernels, where
compute-sanitizer watches.
"""

import importlib
import pkgutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from dsa.cases import CASES
from dsa.cases.case import Case

Results = Sequence[torch.Tensor]

# Ops that run in PyTorch on every device and read contents on the host.
IN_PYTORCH = ("compress_kv", "fp4_block_scales", "widen_fp4")


@dataclass(frozen=True)
class Prepared:
    """A valid call on one device.

    run      the argument's tensor -> every tensor that the call returns or writes (caches too), made anew by each call
    valid    the argument as it should be
    places   name -> (index into `valid`, what of the results a wrong number there does not concern)
    exact    results are compared bit by bit; False where sums are in no order or are split elsewhere: then within
             1e-2 relative or 1e-3
    """

    run: Callable[[torch.Tensor], Results]
    valid: torch.Tensor
    places: dict[str, tuple[Any, Callable[[Results], Results]]]
    exact: bool = True


@dataclass(frozen=True)
class IndexArgument:
    """op and argument by their public names (with a word behind them where a call has variants), and
    prepare: device -> `Prepared`."""

    op: str
    argument: str
    prepare: Callable[[str], Prepared]

    def __str__(self) -> str:
        return f"{self.op}-{self.argument}"


def contents(valid: torch.Tensor) -> dict[str, int]:
    """Numbers that no valid tensor holds, by name. Those beyond 32 bits are for 64-bit arguments."""
    limits = torch.iinfo(valid.dtype)
    numbers = {
        "minus one": -1,
        "minus two": -2,
        "a million": 1_000_000,
        "2**30": 2**30,
        "lowest": limits.min,
        "highest": limits.max,
        "highest but 63": limits.max - 63,
    }
    if limits.bits == 64:
        numbers |= {"2**31": 2**31, "2**32": 2**32, "2**32 + 1": 2**32 + 1, "-2**32": -(2**32)}
    return numbers


def changed(prepared: Prepared) -> Iterator[tuple[str, torch.Tensor, Callable[[Results], Results]]]:
    """(what was done, the argument, what it does not concern) for every place and number, and the whole tensor at once:
    filled with one number, reversed, and of random bits. Of those nothing is left to be right."""

    def nothing(results: Results) -> Results:
        return ()

    valid = prepared.valid
    for name, number in contents(valid).items():
        for place, (index, rest) in prepared.places.items():
            argument = valid.clone()
            argument[index] = number
            yield f"{name} at {place}", argument, rest
        yield f"{name} everywhere", torch.full_like(valid, number), nothing
    yield "reversed", valid.flatten().flip(0).view(valid.shape), nothing
    limits = torch.iinfo(valid.dtype)
    bits = torch.randint(limits.min, limits.max, valid.shape, dtype=valid.dtype, device=valid.device)
    yield "random bits", bits, nothing


def check(argument: IndexArgument, device: str) -> int:
    """Every change of one argument; AssertionError where a result that should be right is not. How many there were."""
    torch.manual_seed(0)
    prepared = argument.prepare(device)
    expected = [x.clone() for x in prepared.run(prepared.valid)]
    count = 0
    for what, tensor, rest in changed(prepared):
        count += 1
        try:
            results = prepared.run(tensor)
        except ValueError as error:
            # Where contents can be looked at they may be refused, by the argument's name.
            assert device == "cpu" or argument.op in IN_PYTORCH, f"{argument}: {what}: {error}"
            assert str(error).startswith(f"{argument.argument.split()[0]}: "), f"{argument}: {what}: {error}"
            continue
        if device == "cuda":
            torch.cuda.synchronize()
        for i, (got, right) in enumerate(zip(rest(results), rest(expected), strict=True)):
            _same(f"{argument}: {what}: result {i}", got, right, prepared.exact)
    return count


def _same(name: str, got: torch.Tensor, right: torch.Tensor, exact: bool) -> None:
    assert got.shape == right.shape, f"{name}: shape {list(got.shape)} for {list(right.shape)}"
    if exact:
        same = torch.equal(*(x.contiguous().reshape(-1).view(torch.uint8) for x in (got, right)))
    else:
        same = torch.allclose(got.double(), right.double(), rtol=1e-2, atol=1e-3, equal_nan=True)
    assert same, f"{name} is not what it is without the wrong number"


def all_arguments() -> list[IndexArgument]:
    """Those of all families, whose modules import this one."""
    modules = [importlib.import_module(f"{__name__}.{name}") for _, name, _ in pkgutil.iter_modules(__path__)]
    old = [argument for module in modules for argument in getattr(module, "ARGUMENTS", ())]
    return [*old, *(IndexArgument(c.name, name, partial(_of_case, c, name)) for c in CASES for name in c.hostile)]


def _of_case(case: Case, name: str, device: str) -> Prepared:
    hostile, argument = case.hostile[name], name.split()[0]
    given = case.arguments(device, **hostile.sizes)

    def run(changed: torch.Tensor) -> Results:
        fresh = case.arguments(device, **hostile.sizes) if case.written else given
        return case.results(fresh | {argument: changed})

    valid = given[argument]
    places = {str(place): (place, hostile.kept(given, place)) for place in hostile.places(valid)}
    return Prepared(run, valid, places, hostile.exact)
