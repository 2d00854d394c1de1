"""The classes `Case` (a call of an op and its check), `Hostile` (how to corrupt an index argument) and `Maker` (random
tensors), and helpers that cases share."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

import dsa

BF16, E4M3, F32, INT32 = torch.bfloat16, torch.float8_e4m3fn, torch.float32, torch.int32
Given = dict[str, Any]
Results = Sequence[torch.Tensor]
Kept = Callable[[Results], Results]


class Maker:
    """Makes random tensors on a device. Makers with equal device and seed give equal tensors for equal sequences of
    calls."""

    def __init__(self, device: str = "cpu", seed: int = 0) -> None:
        self.device, self.generator = device, torch.Generator(device).manual_seed(seed)

    def f32(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=F32, generator=self.generator, device=self.device)

    def bf16(self, *shape: int) -> torch.Tensor:
        return self.f32(*shape).to(BF16)

    def e4m3(self, *shape: int) -> torch.Tensor:
        return self.f32(*shape).to(E4M3)

    def positive(self, *shape: int) -> torch.Tensor:
        return self.f32(*shape).abs() + 0.1

    def ints(self, values: Any, dtype: torch.dtype = INT32) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)

    def below(self, bound: int, *shape: int, dtype: torch.dtype = INT32) -> torch.Tensor:
        return torch.randint(bound, shape, dtype=dtype, generator=self.generator, device=self.device)

    def order(self, rows: int, n: int, k: int) -> torch.Tensor:
        """Return int64 [rows, k]: in each row, k different numbers from 0 to n - 1 in random order."""
        drawn = torch.rand(rows, n, generator=self.generator, device=self.device)
        return drawn.argsort(1)[:, :k].contiguous()

    def float_cache(self, pages: int, page_size: int, d: int) -> torch.Tensor:
        return self.bf16(pages, page_size, 1, d)

    def v32_cache(self, pages: int, page_size: int) -> torch.Tensor:
        parts = self.e4m3(pages, page_size, 1, 512), self.positive(pages, page_size, 1, 4)
        parts = *parts, self.bf16(pages, page_size, 1, 64)
        return torch.cat([x.view(torch.uint8) for x in parts], -1)

    def v4_cache(self, pages: int, page_size: int) -> torch.Tensor:
        cache = dsa.make_v4_cache(pages, page_size, self.device)
        slots = torch.arange(pages * page_size, device=self.device)
        dsa.write_kv_cache(self.bf16(len(slots), 512), cache, slots)
        return cache

    def index_cache(self, pages: int, page_size: int, d: int) -> torch.Tensor:
        values, scales = self.e4m3(pages, page_size * d), self.positive(pages, page_size)
        whole = torch.cat((values.view(torch.uint8), scales.view(torch.uint8)), 1)
        return whole.view(pages, page_size, 1, d + 4)

    def angles(self, tokens: int, rotated: int = 64) -> dict[str, torch.Tensor]:
        angles = self.f32(tokens, rotated // 2)
        return {"cos": angles.cos(), "sin": angles.sin()}


@dataclass(frozen=True)
class Hostile:
    """How to corrupt an argument that contains indices, lengths or bounds. `changed` writes the numbers of `contents`.

    kept    (valid arguments, place) -> a function of the call's results. It returns the parts that a wrong number at
            `place` cannot change
    places  argument -> the places to corrupt: indices into the argument
    sizes   keyword arguments of `Case.make` for these calls
    exact   True: what `kept` selects must have the same bits as in the valid call. False: an element x can differ by
            1e-3 + 1e-2 |x|, because the kernel can sum in another order
    """

    kept: Callable[[Given, Any], Kept]
    places: Callable[[torch.Tensor], Sequence[Any]]
    sizes: Mapping[str, Any] = field(default_factory=dict)
    exact: bool = True


@dataclass(frozen=True)
class Case:
    """A call of an op.

    name     the op's name in `dsa`; if an op has several cases, further words distinguish them
    make     (maker, **sizes) -> all keyword arguments of the op. With default sizes a call takes about a millisecond on
             a CPU
    check    (arguments, results) -> the largest error, as an absolute error, a relative error or calc_diff; 0 where
             results must be exact. It raises AssertionError if a result is wrong. `arguments` have the values from
             before the call. `check` is None if another case of the op already checks what this case computes
    sizes    keyword arguments of `make` for `check` and for GPU tests. They cover the op's special rows, such as
             queries without keys, and full and partial tiles of the kernels
    more     sizes of further calls, which select other options and other kernels, for `check` and for some GPU tests.
             Each entry overrides some of `sizes`
    written  names of arguments that the op writes in place
    hostile  argument name -> how to corrupt the argument, for arguments that contain indices, lengths or bounds. If an
             argument has several entries, further words after its name distinguish them
    """

    name: str
    make: Callable[..., Given]
    check: Callable[[Given, Results], float] | None = None
    sizes: Mapping[str, Any] = field(default_factory=dict)
    more: tuple[Mapping[str, Any], ...] = ()
    written: tuple[str, ...] = ()
    hostile: Mapping[str, Hostile] = field(default_factory=dict)

    @property
    def op(self) -> str:
        return self.name.split()[0]

    def function(self) -> Callable[..., Any]:
        return getattr(dsa, self.op)

    def arguments(self, device: str = "cpu", seed: int = 0, **sizes: Any) -> Given:
        return self.make(Maker(device, seed), **sizes)

    def run(self, arguments: Mapping[str, Any]) -> list[torch.Tensor]:
        return tensors_of(self.function()(**arguments))

    def results(self, arguments: Mapping[str, Any]) -> list[torch.Tensor]:
        """Call the op. Return the tensors that it returns, followed by the arguments that it has written in place."""
        return [*self.run(arguments), *(arguments[name] for name in self.written if arguments[name] is not None)]

    def verify(self, device: str = "cpu", seed: int = 0, **sizes: Any) -> float:
        """Make arguments, call the op and check the results. Return the largest error; raise AssertionError if a result
        is wrong. `sizes` override the case's sizes."""
        return self.check_call(self.arguments(device, seed, **{**self.sizes, **sizes}))

    def check_call(self, arguments: Given) -> float:
        """Call the op with these arguments and check the results. Return the largest error; raise AssertionError if a
        result is wrong."""
        before = {name: arguments[name].clone() for name in self.written if arguments[name] is not None}
        results = self.results(arguments)
        return self.check(arguments | before, results)

    def verify_all(self, device: str = "cpu", seed: int = 0) -> float:
        """Return the largest error over the call with `sizes` and one call for each entry of `more`."""
        return max(self.verify(device, seed, **sizes) for sizes in ({}, *self.more))

    def index_arguments(self) -> set[str]:
        """Return the names of arguments that contain indices, lengths or bounds: all int32 and int64 tensors of a call
        with default sizes, except those that the op writes."""
        found = {name: x for name, x in self.arguments().items() if isinstance(x, torch.Tensor)}
        return {name for name, x in found.items() if x.dtype in (torch.int32, torch.int64) and name not in self.written}


def tensors_of(found: Any) -> list[torch.Tensor]:
    return [x for x in (found if isinstance(found, tuple) else (found,)) if isinstance(x, torch.Tensor)]


def same_bits(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Return whether two tensors have equal shape, dtype, device and bytes."""
    if (x.shape, x.dtype, x.device) != (y.shape, y.dtype, y.device):
        return False
    return torch.equal(*(t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (x, y)))


# The places at which hostile numbers are written, and the results that they cannot change.


def ends(x: torch.Tensor) -> list[Any]:
    """Return the places (index tuples) of the last element in the first, a middle and the last row of x."""
    rows = sorted({0, len(x) // 2, len(x) - 1})
    return [(i, *(n - 1 for n in x.shape[1:])) for i in rows]


def other_rows(given: Given, place: tuple[int, ...]) -> Kept:
    """Return a function that keeps all rows of the results except row place[0]: a number in row i of the argument
    affects only row i of the results."""
    return lambda results: [x[[i for i in range(len(x)) if i != place[0]]] for x in results]


def nothing(given: Given, place: tuple[int, ...]) -> Kept:
    return lambda results: ()


PER_ROW = Hostile(other_rows, ends)


def contents(valid: torch.Tensor) -> dict[str, int]:
    """Return {name: number}. The numbers are invalid as indices, lengths and bounds. Only -1 can be valid, where it
    means "none"."""
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


def changed(hostile: Hostile, given: Given, name: str) -> Iterator[tuple[str, torch.Tensor, Kept]]:
    """Yield (description of the change, the changed argument, a function that selects the results that must not
    change).

    After a change of all elements any result may differ.
    """
    valid, nothing_kept = given[name], nothing(given, ())
    for what, number in contents(valid).items():
        for place in hostile.places(valid):
            argument = valid.clone()
            argument[place] = number
            yield f"{what} at {place}", argument, hostile.kept(given, place)
        yield f"{what} everywhere", torch.full_like(valid, number), nothing_kept
    yield "reversed", valid.flatten().flip(0).view(valid.shape), nothing_kept
    limits = torch.iinfo(valid.dtype)
    bits = torch.randint(limits.min, limits.max, valid.shape, dtype=valid.dtype, device=valid.device)
    yield "random bits", bits, nothing_kept
