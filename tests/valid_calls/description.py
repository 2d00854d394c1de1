"""How a valid call is described: its arguments, made anew for a device, and what the op promises to return."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

import dsa

BF16, E4M3, F32, INT32 = torch.bfloat16, torch.float8_e4m3fn, torch.float32, torch.int32
Arguments = Mapping[str, Any]
Promise = list[tuple[tuple[int, ...], torch.dtype]]


class Maker:
    """Tensors of random numbers on a device, the same for every maker."""

    def __init__(self, device: str):
        self.device, self.generator = device, torch.Generator("cpu").manual_seed(0)

    def f32(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=F32, generator=self.generator, device="cpu").to(self.device)

    def bf16(self, *shape: int) -> torch.Tensor:
        return self.f32(*shape).to(BF16)

    def e4m3(self, *shape: int) -> torch.Tensor:
        return self.f32(*shape).to(torch.float8_e4m3fn)

    def positive(self, *shape: int) -> torch.Tensor:
        return self.f32(*shape).abs() + 0.1

    def ints(self, values: Any, dtype: torch.dtype = INT32) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)

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
class ValidCall:
    """name      the op's, with a word behind it where the op has several calls
    op           the op's name in `dsa`
    make         maker -> the keyword arguments
    promises     arguments -> shapes and dtypes of what is returned
    written      arguments that are written in place
    """

    name: str
    op: str
    make: Callable[[Maker], dict[str, Any]]
    promises: Callable[[Arguments], Promise]
    written: tuple[str, ...]

    def function(self) -> Callable[..., Any]:
        return getattr(dsa, self.op)

    def arguments(self, device: str = "cpu") -> dict[str, Any]:
        """Fresh ones, with the same numbers every time."""
        return self.make(Maker(device))

    def index_arguments(self) -> set[str]:
        """Those whose contents are indices, lengths or bounds: all of its tensors of integers but for bytes and what is
        written."""
        found = {name: x for name, x in self.arguments().items() if isinstance(x, torch.Tensor)}
        return {name for name, x in found.items() if x.dtype in (torch.int32, torch.int64) and name not in self.written}

    def run(self, arguments: Arguments) -> list[torch.Tensor]:
        """Every tensor that the op returns."""
        found = self.function()(**arguments)
        found = found if isinstance(found, tuple) else (found,)
        return [x for x in found if isinstance(x, torch.Tensor)]

    def results(self, arguments: Arguments) -> list[torch.Tensor]:
        """What the op returns, and then what it has written to its arguments."""
        return [*self.run(arguments), *(arguments[name] for name in self.written if arguments[name] is not None)]


def same_bits(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Of equal shape, dtype, device and bytes."""
    if (x.shape, x.dtype, x.device) != (y.shape, y.dtype, y.device):
        return False
    return torch.equal(*(t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (x, y)))


def call(
    calls: list[ValidCall], name: str, promises: Callable[[Arguments], Promise], written: tuple[str, ...] = ()
) -> Callable:
    """Adds what it decorates to `calls`; `name` begins with the op's."""

    def add(make: Callable[[Maker], dict[str, Any]]) -> None:
        calls.append(ValidCall(name, name.split()[0], make, promises, written))

    return add


def like(name: str) -> Callable[[Arguments], Promise]:
    """One tensor of the argument's shape and dtype."""
    return lambda a: [(tuple(a[name].shape), a[name].dtype)]


def nothing(a: Arguments) -> Promise:
    return []
