"""Hostile contents for what writes and reads caches: slots, what they are made of, and the compressor's sequences."""

from collections.abc import Callable, Iterable
from functools import partial
from itertools import pairwise

import torch

import dsa
from tests.hostile import IndexArgument, Prepared, Results
from tests.hostile.places import BOTH, int32, own_row, places, randn, rows_but
from tests.hostile.unconcerned import nothing

E4M3 = torch.float8_e4m3fn
PAGES, PAGE, TOKENS = 3, 64, 9
FILLING = 0x11


class Cache:
    """A cache full of one byte. layout: a float dtype's name, "v32", "v4", or "index" with 128 channels."""

    def __init__(self, layout: str, channels: int, device: str):
        self.layout, self.channels, self.device = layout, channels, device

    def make(self) -> torch.Tensor:
        if self.layout == "v4":
            cache = dsa.make_v4_cache(PAGES, PAGE, self.device)
        else:
            floats = {"v32": 656, "index": self.channels + 4}
            dtype = torch.uint8 if self.layout in floats else getattr(torch, self.layout)
            width = floats.get(self.layout, self.channels)
            cache = torch.zeros(PAGES, PAGE, 1, width, dtype=dtype, device=self.device)
        self.bytes(cache).fill_(FILLING)
        return cache

    def bytes(self, cache: torch.Tensor) -> torch.Tensor:
        """[pages, bytes], those between the pages too."""
        raw = cache.view(torch.uint8)
        return raw.as_strided((PAGES, raw.stride(0)), (raw.stride(0), 1))

    def but(self, slots: Iterable[int]) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return a function that gives the cache's bytes outside these slots."""
        at = torch.arange(self.bytes(self.make()).shape[1])
        if self.layout == "v4":
            offset = torch.where(at < PAGE * 576, at // 576, (at - PAGE * 576) // 8)
        elif self.layout == "index":
            d = self.channels
            offset = torch.where(at < PAGE * d, at // d, (at - PAGE * d) // 4)
        else:
            offset = at // (len(at) // PAGE)
        slot = torch.arange(PAGES)[:, None] * PAGE + torch.where(offset < PAGE, offset, PAGES * PAGE)
        others = ~torch.isin(slot, torch.tensor(list(slots), dtype=torch.long))
        return lambda raw: raw[others.to(raw.device)]


def some_slots(count: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    slots = torch.randperm(PAGES * PAGE)[:count]
    slots[1] = -1
    return slots.to(dtype).to(device)


def reading(device: str, dtype: torch.dtype, layout: str, channels: int) -> Prepared:
    cache = Cache(layout, channels, device).make()
    slots = some_slots(TOKENS, dtype, device)

    def run(given: torch.Tensor) -> Results:
        if layout == "index":
            return dsa.read_indexer_cache(cache, given)
        return [dsa.read_kv_cache(cache, given)]

    return Prepared(run, slots, own_row(TOKENS))


def writing(device: str, dtype: torch.dtype, op: str, layout: str, channels: int) -> Prepared:
    cache = Cache(layout, channels, device)
    slots = some_slots(TOKENS, dtype, device)
    row = randn(TOKENS, channels, device=device, dtype=torch.bfloat16)
    gain, bias = (torch.rand(n).to(device) for n in (min(channels, 512), 128))
    cos, sin = (randn(TOKENS, 32, device=device) for _ in range(2))
    k8, scale = row.to(E4M3), torch.rand(TOKENS).to(device)

    def run(given: torch.Tensor) -> Results:
        target, out = cache.make(), torch.zeros_like(row)
        match op:
            case "write_indexer_cache":
                dsa.write_indexer_cache(k8, scale, target, given)
            case "write_indexer_keys":
                dsa.write_indexer_keys(row, gain, bias, cos, sin, target, given)
            case "write_kv_cache":
                dsa.write_kv_cache(row, target, given)
            case "write_mla_cache":
                dsa.write_mla_cache(row, gain, cos, sin, target, given, out=out)
        # What is kept beside the cache does not depend on the slots.
        return [cache.bytes(target), out]

    def rest(i: int) -> Callable[[Results], Results]:
        others = cache.but([int(slots[i])])
        return lambda results: (others(results[0]), results[1])

    return Prepared(run, slots, places(TOKENS, rest))


LENGTHS, STARTS, STATE_SLOTS = (13, 0, 270, 5, 9), (2, 7, 120, 0, 3), (4, 0, 6, 2, 1)


class Compressor:
    """Five sequences with a state. kind: channels of an entry, tokens of a block, whether blocks overlap."""

    def __init__(self, kind: tuple[int, int, bool], layout: str, slot_dtype: torch.dtype, device: str):
        self.d, m, self.overlap = kind
        self.cache = Cache(layout, self.d, device)
        tokens, c = sum(LENGTHS), 2 * self.d if self.overlap else self.d
        self.bounds = [sum(LENGTHS[:b]) for b in range(len(LENGTHS) + 1)]
        slots = torch.full((tokens,), -1)
        for low, high, start in zip(self.bounds, self.bounds[1:], STARTS):
            ends = (torch.arange(low, high) - low + start + 1) % m == 0
            slots[low:high][ends] = 0
        ending = slots >= 0
        slots[ending] = torch.randperm(PAGES * PAGE)[: int(ending.sum())]
        self.state = randn(8, 2 * m if self.overlap else m, 2, c, device=device)
        self.projections = (*(randn(tokens, c, device=device) for _ in range(2)), randn(m, c, device=device))
        self.rest = (torch.rand(self.d).to(device), *(randn(tokens, 32, device=device) for _ in range(2)))
        self.named = {
            "slots": slots.to(slot_dtype).to(device),
            "cu_seqlens": int32(self.bounds, device),
            "starts": int32(STARTS, device),
            "state_slots": int32(STATE_SLOTS, device),
        }

    def write(self, argument: str, given: torch.Tensor) -> Results:
        own = self.named | {argument: given}
        cache, state = self.cache.make(), self.state.clone()
        dsa.write_compressed_kv(*self.projections, *self.rest, cache, **own, state=state, overlap=self.overlap)
        return [self.cache.bytes(cache), state]

    def compress(self, argument: str, given: torch.Tensor) -> Results:
        own = self.named | {argument: given}
        del own["slots"]
        state = self.state.clone()
        return [*dsa.compress_kv(*self.projections, **own, state=state, overlap=self.overlap), state]

    def without(self, sequences: Iterable[int]) -> Callable[[Results], Results]:
        """All but what these sequences write."""
        wrong = [b for b in sequences if 0 <= b < len(LENGTHS)]
        slots = [int(s) for b in wrong for s in self.named["slots"][self.bounds[b] : self.bounds[b + 1]]]
        cache, state = self.cache.but(slots), rows_but([STATE_SLOTS[b] for b in wrong])
        return lambda results: (cache(results[0]), *state(results[1:]))

    def without_slot(self, token: int) -> Callable[[Results], Results]:
        cache = self.cache.but([int(self.named["slots"][token])])
        return lambda results: (cache(results[0]), results[1])


def compressing(
    device: str,
    argument: str,
    kind: tuple[int, int, bool] = (128, 4, True),
    layout: str = "index",
    slot_dtype: torch.dtype = torch.int32,
    entries_alone: bool = False,
) -> Prepared:
    case = Compressor(kind, layout, slot_dtype, device)
    valid = case.named[argument]
    if entries_alone:
        return Prepared(partial(case.compress, argument), valid, places(len(valid), lambda i: nothing))
    if argument == "slots":
        ending = (valid >= 0).nonzero()[:, 0].tolist()
        where = {f"token {i}": (i, case.without_slot(i)) for i in (0, ending[0], ending[-1])}
    elif argument == "cu_seqlens":
        where = {f"boundary {i}": (i, case.without((i - 1, i))) for i in range(len(valid))}
    else:
        where = places(len(valid), lambda b: case.without([b]))
    return Prepared(partial(case.write, argument), valid, where)


MAPPED = [0, 3, 3, 9, 17, 30]


def mapping(device: str, argument: str, ring: bool) -> Prepared:
    """Each sequence has as many cached tokens before its own ones. A ring is one page, which holds the last rows."""
    sequences = len(MAPPED) - 1
    named = {
        "block_table": torch.randint(0, PAGES, (sequences, 1 if ring else 8), dtype=torch.int32).to(device),
        "cu_seqlens": int32(MAPPED, device),
        "cache_seqlens": int32([2 * (high - low) for low, high in pairwise(MAPPED)], device),
    }
    options = {"num_tokens": MAPPED[-1], "page_size": 4, "ring": ring}

    def run(given: torch.Tensor) -> Results:
        own = named | {argument: given}
        every = own | {"cache_seqlens": None}
        return [dsa.slot_mapping(**x, **options, ratio=ratio) for x in (own, every) for ratio in (1, 3)]

    def rest(first: int, last: int) -> Callable[[Results], Results]:
        return rows_but(range(MAPPED[max(first, 0)], MAPPED[min(last, sequences)]))

    if argument == "cu_seqlens":
        where = {f"boundary {i}": (i, rest(i - 1, i + 1)) for i in range(len(MAPPED))}
    else:
        where = places(sequences, lambda b: rest(b, b + 1), 0 if argument == "block_table" else None)
    return Prepared(run, named[argument], where)


SEQUENCES = ("cu_seqlens", "starts", "state_slots")
# op, the caches that it writes: layout and channels.
WRITERS = [
    ("write_indexer_cache", ("index", 128)),
    ("write_indexer_keys", ("index", 128)),
    *(("write_kv_cache", x) for x in (("bfloat16", 576), ("float32", 512), ("v32", 576), ("v4", 512))),
    *(("write_mla_cache", x) for x in (("bfloat16", 576), ("v32", 576), ("v4", 512))),
]
COMPRESSED = [((128, 4, True), "index"), ((512, 4, True), "v4"), ((512, 128, False), "bfloat16")]

ARGUMENTS: list[IndexArgument] = [
    *(
        IndexArgument(op, f"slots {layout} {name}", partial(reading, dtype=dtype, layout=layout, channels=channels))
        for op, layout, channels in (
            ("read_indexer_cache", "index", 128),
            ("read_kv_cache", "bfloat16", 576),
            ("read_kv_cache", "v32", 576),
            ("read_kv_cache", "v4", 512),
        )
        for name, dtype in BOTH.items()
    ),
    *(
        IndexArgument(op, f"slots {x[0]} {name}", partial(writing, dtype=dtype, op=op, layout=x[0], channels=x[1]))
        for op, x in WRITERS
        for name, dtype in BOTH.items()
    ),
    *(IndexArgument("compress_kv", x, partial(compressing, argument=x, entries_alone=True)) for x in SEQUENCES),
    *(
        IndexArgument(
            "write_compressed_kv",
            f"{x} {layout} {kind[1]}",
            partial(compressing, argument=x, kind=kind, layout=layout),
        )
        for x in (*SEQUENCES, "slots")
        for kind, layout in COMPRESSED
    ),
    IndexArgument("write_compressed_kv", "slots int64", partial(compressing, argument="slots", slot_dtype=torch.int64)),
    *(
        IndexArgument("slot_mapping", f"{x}{' of rings' * ring}", partial(mapping, argument=x, ring=ring))
        for x in ("block_table", "cu_seqlens", "cache_seqlens")
        for ring in (False, True)
    ),
]
