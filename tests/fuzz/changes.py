"""Random changes of an argument; the argument's type decides which changes are possible.

Ints are at most 200 in magnitude or at least 2^31. An int can be a size of the result: results of sizes in between
would need gigabytes, and ops refuse sizes of 2^31 and above.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import torch

from dsa import FlashMLASchedMeta


class Kind(Enum):
    SAME = "the same numbers: the result has the same bits"
    CONTENTS = "other numbers in a tensor: no shape or dtype may change"
    OTHER = "something else"


@dataclass(frozen=True)
class Change:
    what: str
    value: Any
    kind: Kind = Kind.OTHER


DTYPES = (
    *(torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn, torch.complex64),
    *(torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool),
)
INTS = (
    -(10**30),
    -(2**63),
    -(2**31),
    -2,
    -1,
    0,
    1,
    2,
    3,
    4,
    7,
    16,
    63,
    64,
    65,
    127,
    128,
    129,
    200,
    2**31,
    2**32 + 1,
    10**30,
)
FLOATS = (
    *(float("nan"), float("inf"), -float("inf"), 1e39, -1e39, 3e38, -1.0, 0.0, -0.0, 1e-45, 1e-300),
    *(2, 2**63, 10**30, 10**400),
)
NO_NUMBERS = (None, "1", [1], (), 1 + 2j, torch.float32, b"1")
WORDS = ("first", "last", "sigmoid", "sqrtsoftplus", "", "all", "cpu", "meta", "tpu", "cuda:99")
STRANGE = (None, True, 3, 0.5, "x", [1, 2], (), {}, torch.float32, object)


def change(rng: random.Random, value: Any, device: str) -> Change:
    if isinstance(value, torch.Tensor):
        return rng.choice(OF_TENSORS)(rng, value, device)
    if isinstance(value, tuple | list):
        return _of_tensors(rng, value, device)
    if value is None:
        numbers = torch.tensor([[1, 0]], dtype=torch.int32, device=device)
        return _shown(rng.choice((numbers, numbers[0], numbers.float(), *STRANGE[1:])))
    for of, others in (
        (bool, (not value, 0, 1, 2, 1.0, "yes", [], torch.tensor(True), *NO_NUMBERS)),
        (int, (*INTS, True, 1.0, 1.5, float("nan"), torch.tensor(1), *NO_NUMBERS)),
        (float, (*FLOATS, True, torch.tensor(0.5), *NO_NUMBERS)),
        (str, (*WORDS, *STRANGE)),
        (torch.dtype, (*DTYPES, "float32", *STRANGE)),
        (FlashMLASchedMeta, (FlashMLASchedMeta(True, {"q": (1,)}), torch.zeros(1, 8), *STRANGE)),
    ):
        if isinstance(value, of):
            return _shown(rng.choice(others))
    raise TypeError(f"value: no changes for a {type(value).__name__}")


def _shown(value: Any) -> Change:
    if isinstance(value, torch.Tensor):
        return Change(f"a tensor {list(value.shape)} of {value.dtype}", value)
    return Change(f"{str(value)[:40]!r} ({type(value).__name__})", value)


def _of_tensors(rng: random.Random, values: tuple | list, device: str) -> Change:
    kind = rng.randrange(8)
    if kind < 5:
        place = rng.randrange(len(values))
        one = change(rng, values[place], device)
        changed = [*values]
        changed[place] = one.value
        return Change(f"[{place}] {one.what}", type(values)(changed), one.kind)
    if kind == 5:
        return Change("as another sequence", (list if isinstance(values, tuple) else tuple)(values), Kind.SAME)
    if kind == 6:
        return Change(f"{rng.choice((0, 1, 3))} of them", type(values)(([*values] * 2)[: rng.choice((0, 1, 3))]))
    return _shown(rng.choice((values[0], *STRANGE)))


def _type(rng: random.Random, x: torch.Tensor, device: str) -> Change:
    array = np.zeros(tuple(x.shape), np.float32)
    return _shown(rng.choice((*STRANGE, (x,), [x], array, array.tolist())))


def _dtype(rng: random.Random, x: torch.Tensor, device: str) -> Change:
    dtype = rng.choice([d for d in DTYPES if d != x.dtype])
    changed = x.view(dtype) if dtype.itemsize == x.dtype.itemsize and rng.random() < 0.5 else x.to(dtype)
    return Change(f"of {dtype}", changed)


def _rank(rng: random.Random, x: torch.Tensor, device: str) -> Change:
    ways: list[Callable[[], torch.Tensor]] = [lambda: x.unsqueeze(rng.randint(0, x.dim())), x.flatten]
    if x.dim() and 0 not in x.shape:
        ways += [lambda: x.select(rng.randrange(x.dim()), 0), lambda: x.flatten()[0]]
    changed = rng.choice(ways)()
    if changed.dim() == x.dim():
        changed = x.unsqueeze(0)
    return Change(f"of shape {list(changed.shape)} for {list(x.shape)}", changed)


def _size(rng: random.Random, x: torch.Tensor, device: str) -> Change:
    if x.dim() == 0 or 0 in x.shape:
        return _rank(rng, x, device)
    dim = rng.randrange(x.dim())
    size = x.shape[dim]
    size = rng.choice([n for n in (0, 1, size - 1, size + 1, 2 * size, size + 7) if n != size])
    index = torch.arange(size, device=x.device) % x.shape[dim]
    changed = _bits(x).index_select(dim, index).view(x.dtype)
    return Change(f"of shape {list(changed.shape)} for {list(x.shape)}", changed)


def _bits(x: torch.Tensor) -> torch.Tensor:
    """Return x in a dtype for which torch implements index_select: one-byte dtypes as uint8."""
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x


def _stride(rng: random.Random, x: torch.Tensor, device: str) -> Change:
    if x.dim() == 0:
        return _rank(rng, x, device)
    way = rng.choice(("every second", "wider rows", "transposed", "shifted", "expanded"))
    if way == "every second":
        changed = x.new_empty((*x.shape[:-1], 2 * x.shape[-1]))[..., ::2]
    elif way == "wider rows":
        changed = x.new_empty((*x.shape[:-1], x.shape[-1] + rng.choice((1, 8, 16))))[..., : x.shape[-1]]
    elif way == "transposed":
        changed = x.new_empty(x.transpose(0, -1).shape).transpose(0, -1)
    elif way == "shifted":
        changed = x.new_empty(x.numel() + 1)[1:].view(x.shape)
    else:
        dim = rng.randrange(x.dim())
        # A result for the expanded tensor must equal that for a contiguous copy. But expanded integers, such as `ends`,
        # can leave parts of the result unspecified.
        kind = Kind.SAME if x.is_floating_point() else Kind.CONTENTS
        return Change(f"expanded from its first along {dim}", x[:].narrow(dim, 0, 1).expand(x.shape), kind)
    return Change(way, changed.copy_(x), Kind.SAME)


def _device(rng: random.Random, x: torch.Tensor, device: str) -> Change:
    other = rng.choice(("meta", "cpu")) if device != "cpu" else "meta"
    return Change(f"on {other}", x.to(other))


def _gradient(rng: random.Random, x: torch.Tensor, device: str) -> Change:
    if x.dtype not in (torch.float32, torch.bfloat16):
        return _contents(rng, x, device)
    return Change("with requires_grad", x.clone().requires_grad_(), Kind.SAME)


def _empty(rng: random.Random, x: torch.Tensor, device: str) -> Change:
    return Change("empty", x.new_empty((0,) * x.dim() if rng.random() < 0.5 else (0, *x.shape[1:])))


def _contents(rng: random.Random, x: torch.Tensor, device: str) -> Change:
    changed = x.clone()  # clone keeps a cache's strides
    if x.dtype == torch.uint8:
        generator = torch.Generator().manual_seed(rng.randrange(2**32))
        changed.copy_(torch.randint(256, x.shape, dtype=torch.uint8, generator=generator))
        return Change("random bytes", changed, Kind.CONTENTS)
    if x.dtype == torch.float8_e8m0fnu:  # torch converts only powers of two to this dtype, so write bytes
        byte = rng.choice((0, 1, 127, 254, 255))
        changed.view(torch.uint8).fill_(byte)
        return Change(f"all of the byte {byte}", changed, Kind.CONTENTS)
    if x.dtype.is_floating_point:
        limits = (3e38, -3e38) if x.dtype in (torch.float32, torch.bfloat16) else (448.0,)
        number = rng.choice((float("nan"), *limits, -0.0, 0.0))
        if x.dtype != torch.float8_e4m3fn:
            number = rng.choice((number, float("inf"), -float("inf")))
    else:
        info = torch.iinfo(x.dtype)
        number = rng.choice((-1, -2, 10**6, 2**30, info.min, info.max, info.max - 63, 2**31, 2**32 + 1, -(2**32)))
        number = min(max(number, info.min), info.max)
    if rng.random() < 0.5 or not x.numel():
        changed.fill_(number)
        return Change(f"all {number}", changed, Kind.CONTENTS)
    place = tuple(rng.randrange(n) for n in x.shape)
    changed[place] = number
    return Change(f"{number} at {place}", changed, Kind.CONTENTS)


# Repeated functions are chosen more often. Changes of the type are rare, because one check refuses nearly all of them.
OF_TENSORS = (
    *(_type, _dtype, _rank, _size, _size, _device, _empty, _gradient, _gradient),
    *(_stride, _stride, _stride, _contents, _contents, _contents),
)
