"""Index keys of sequences in pages, and their queries, for tests of scores and of selections over pages."""

import torch

from dsa.reference.cache.indexer_cache import write_indexer_cache
from dsa.testing import poisoned

GARBAGE = torch.tensor([-1, 10**8, -(2**31), 2**31 - 1], dtype=torch.int32)


def int32(values):
    return torch.as_tensor(values, dtype=torch.int32, device="cuda")


class PagedKeys:
    """Random keys in random pages of a cache whose other bytes are NaN; garbage in the table's rest."""

    def __init__(self, lengths, next_n=1, heads=64, dim=128, page_size=64, spare_pages=3):
        used = [-(-n // page_size) for n in lengths]
        width = max([*used, 1]) + 1
        self.cache = poisoned((sum(used) + spare_pages, page_size, 1, dim + 4), torch.uint8, "cuda")
        order = torch.randperm(len(self.cache))
        table = GARBAGE.repeat(len(lengths) * width)[: len(lengths) * width].view(len(lengths), width).clone()
        slots, at = [], 0
        for b, n in enumerate(lengths):
            own = order[at : at + used[b]]
            table[b, : used[b]], at = own, at + used[b]
            slots.append((own[:, None] * page_size + torch.arange(page_size)).view(-1)[:n])
        self.slots = torch.cat(slots).cuda()
        self.table, self.lengths, self.next_n = table.cuda(), int32(lengths), next_n
        keys = torch.randn(len(self.slots), dim, device="cuda").to(torch.float8_e4m3fn)
        self.write(keys, torch.rand(len(self.slots), device="cuda") + 0.1)
        self.q = torch.randn(len(lengths), next_n, heads, dim, device="cuda").to(torch.float8_e4m3fn)
        self.weights = torch.randn(len(lengths) * next_n, heads, device="cuda")

    def write(self, keys, scales):
        write_indexer_cache(keys, scales, self.cache, self.slots)
