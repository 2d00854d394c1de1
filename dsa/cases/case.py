"""What a case is, and what makes its tensors."""

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
    """Tensors of random numbers on a device, the same for every maker of one seed."""

    def __init__(self, device: str = "cpu", seed: int = 0) -> None:
        self.device, self.generator = device, torch.Generator(device).manual_seed(seed)

    def f32(self, *shape: int) -> torch.Tensor:
        """Gaussian."""
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
        """Integers from 0 to bound - 1."""
        return torch.randint(bound, shape, dtype=dtype, generator=self.generator, device=self.device)

    def order(self, rows: int, n: int, k: int) -> torch.Tensor:
        """int64 [rows, k]: in each row k different numbers below n, in any order."""
        drawn = torch.rand(rows, n, generator=self.generator, device=self.device)
        return drawn.argsort(1)[:, :k].contiguous()

    def float_cache(self, pages: int, page_size: int, d: int) -> torch.Tensor:
        return self.bf16(pages, page_size, 1, d)

    def v32_cache(self, pages: int, page_size: int) -> torch.Tensor:
        """Bytes that `write_kv_cache` could have written: e4m3, four fp32 scales, bf16."""
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
    """An argument of indices, lengths or bounds, in which numbers are put that no valid call has.

    kept    (arguments, place) -> what of the results a wrong number there does not concern, of all results
    places  arguments -> the places: indices into the argument
    sizes   of the call
    exact   False where what is kept may be summed in another order: then it is compared within 1e-2 or 1e-3
    """

    kept: Callable[[Given, Any], Kept]
    places: Callable[[torch.Tensor], Sequence[Any]]
    sizes: Mapping[str, Any] = field(default_factory=dict)
    exact: bool = True


@dataclass(frozen=True)
class Case:
    """A call of an op.

    name     the op's name in `dsa`, with more words where it has several cases
    make     (maker, **sizes) -> all keyword arguments; the default sizes take about a millisecond on a CPU
    check    (arguments, results) -> the largest error; AssertionError where a result is not right. None where another
             case of the op checks what this one computes
    sizes    for `check` and GPU tests: every kind of row, the kernel's tiles and what is left over
    more     other sizes for `check` and for strides on a GPU: options and sizes that have kernels of their own
    written  arguments that are written in place
    hostile  those that hold indices, lengths or bounds, by name; more words tell several of one apart
    ordered  whether runs give the same bits
    """

    name: str
    make: Callable[..., Given]
    check: Callable[[Given, Results], float] | None = None
    sizes: Mapping[str, Any] = field(default_factory=dict)
    more: tuple[Mapping[str, Any], ...] = ()
    written: tuple[str, ...] = ()
    hostile: Mapping[str, Hostile] = field(default_factory=dict)
    ordered: bool = True

    @property
    def op(self) -> str:
        return self.name.split()[0]

    def function(self) -> Callable[..., Any]:
        return getattr(dsa, self.op)

    def arguments(self, device: str = "cpu", seed: int = 0, **sizes: Any) -> Given:
        """Fresh ones; the same numbers for the same seed and sizes."""
        return self.make(Maker(device, seed), **sizes)

    def run(self, arguments: Mapping[str, Any]) -> list[torch.Tensor]:
        """Every tensor that the op returns."""
        return tensors_of(self.function()(**arguments))

    def results(self, arguments: Mapping[str, Any]) -> list[torch.Tensor]:
        """What the op returns, and then what it has written to its arguments."""
        return [*self.run(arguments), *(arguments[name] for name in self.written if arguments[name] is not None)]

    def verify(self, device: str = "cpu", seed: int = 0, **sizes: Any) -> float:
        """The largest error of a call; AssertionError where a result is not right. sizes: beside those of the case."""
        return self.check_call(self.arguments(device, seed, **{**self.sizes, **sizes}))

    def check_call(self, arguments: Given) -> float:
        """The largest error of a call with these arguments."""
        before = {name: arguments[name].clone() for name in self.written if arguments[name] is not None}
        results = self.results(arguments)
        return self.check(arguments | before, results)

    def verify_all(self, device: str = "cpu", seed: int = 0) -> float:
        """The largest error of a call with `sizes` and of one for each of `more`."""
        return max(self.verify(device, seed, **sizes) for sizes in ({}, *self.more))

    def index_arguments(self) -> set[str]:
        """Those whose contents are indices, lengths or bounds: all of its tensors of integers but for bytes and what is
        written."""
        found = {name: x for name, x in self.arguments().items() if isinstance(x, torch.Tensor)}
        return {name for name, x in found.items() if x.dtype in (torch.int32, torch.int64) and name not in self.written}


def tensors_of(found: Any) -> list[torch.Tensor]:
    """Those that an op returns."""
    return [x for x in (found if isinstance(found, tuple) else (found,)) if isinstance(x, torch.Tensor)]


def same_bits(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Of equal shape, dtype, device and bytes."""
    if (x.shape, x.dtype, x.device) != (y.shape, y.dtype, y.device):
        return False
    return torch.equal(*(t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (x, y)))


# What hostile numbers concern.


def ends(x: torch.Tensor) -> list[Any]:
    """The first place of a tensor, one in the middle and the last; of a matrix in its last column."""
    rows = sorted({0, len(x) // 2, len(x) - 1})
    return [(i, *(n - 1 for n in x.shape[1:])) for i in rows]


def other_rows(given: Given, place: tuple[int, ...]) -> Kept:
    """A number concerns the row of the results in which it stands."""
    return lambda results: [x[[i for i in range(len(x)) if i != place[0]]] for x in results]


def nothing(given: Given, place: tuple[int, ...]) -> Kept:
    return lambda results: ()


PER_ROW = Hostile(other_rows, ends)


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


def changed(hostile: Hostile, given: Given, name: str) -> Iterator[tuple[str, torch.Tensor, Kept]]:
    """(what was done, the argument, what it does not concern) for every place and number, and the whole tensor at once:
    filled with one number, reversed, and of random bits. Of those nothing is left to be right."""
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
