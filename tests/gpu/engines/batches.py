"""Paged index keys, caches, queries and a decoding step in vLLM's layouts, for GPU tests of the adapters for vLLM."""

import torch

import dsa
from dsa.compat import deep_gemm
from dsa.reference.cache import kv_cache
from dsa_engines.vllm import adapters

DEVICE, PAGE, INT32 = "cuda", 64, torch.int32


def int32(values):
    return torch.as_tensor(values, dtype=INT32, device=DEVICE)


def normal(*shape):
    return torch.randn(*shape, device=DEVICE)


def latent(*shape):
    return (normal(*shape) / 10).clamp(-1, 1)


def formula(function, *args, **options):
    with dsa.use_backend("reference"):
        return function(*args, **options)


def written(out):
    return out.clone(), out.fill_(7)


class Index:
    """A paged cache of index keys. The pages are in random order. They are not adjacent in memory, as in an engine in
    which several layers share each block of memory."""

    def __init__(self, lengths, heads=64, dim=128):
        pages = [-(-n // PAGE) for n in lengths]
        total, self.heads, self.dim, self.lengths = sum(pages) + 3, heads, dim, lengths
        self.k, scale = dsa.per_token_cast_to_fp8(normal(total * PAGE, dim), use_ue8m0=True)
        self.scale = scale.view(-1)
        self.cache = torch.full((total, 2, PAGE, dim + 4), 0xFF, dtype=torch.uint8, device=DEVICE)[:, 1]
        slots = torch.arange(total * PAGE, device=DEVICE)
        dsa.write_indexer_cache(self.k, self.scale, self.cache.unsqueeze(2), slots)
        self.table = torch.full((len(lengths), max(pages)), -1, dtype=INT32, device=DEVICE)
        order = torch.randperm(total).tolist()
        for row, count in zip(self.table, pages):
            row[:count] = int32([order.pop() for _ in range(count)])

    def queries(self, *shape):
        q = normal(*shape, self.heads, self.dim).to(torch.float8_e4m3fn)
        return q, normal(q.shape[:-2].numel(), self.heads)


def bytes_cache(rows):
    pages = rows // PAGE
    cache = torch.zeros(pages, PAGE, 656, dtype=torch.uint8, device=DEVICE)
    dsa.write_kv_cache(latent(rows, 576), cache.unsqueeze(2), torch.arange(rows, device=DEVICE))
    return cache


def v4_cache(rows, page):
    cache, slots = kv_cache.make_v4_cache(rows // page, page, DEVICE), torch.arange(rows, device=DEVICE)
    dsa.write_kv_cache(latent(rows, 512), cache, slots)
    return cache


class Step:
    """A decoding step of one layer. Plan and selection are written to buffers at fixed addresses, as in vLLM."""

    def __init__(self, next_n, heads=16, k=512):
        self.lengths = [3000, 700, 64, 1]
        self.next_n, self.k, self.index = next_n, k, Index(self.lengths)
        batch, columns = len(self.lengths), 4096
        self.each = torch.zeros(batch, next_n, dtype=INT32, device=DEVICE)
        self.q, self.weights = self.index.queries(batch, next_n)
        self.plan = torch.zeros(dsa.num_sms(DEVICE) + 1, 2, dtype=INT32, device=DEVICE)
        self.buffer = torch.full((batch * next_n + 1, k + 64), 7, dtype=INT32, device=DEVICE)
        self.columns, self.keys = columns, bytes_cache(len(self.index.cache) * PAGE)
        self.queries = latent(batch, next_n, heads, 576).bfloat16()
        self.of = torch.arange(batch, device=DEVICE).repeat_interleave(next_n)

    def set(self, lengths):
        steps = torch.arange(1 - self.next_n, 1, dtype=INT32, device=DEVICE)
        self.each.copy_((int32(lengths)[:, None] + steps).clamp(min=0))

    def run(self):
        sms = adapters.schedule_slots(dsa.num_sms(DEVICE), self.next_n)
        self.plan[:] = deep_gemm.get_paged_mqa_logits_metadata(self.each, PAGE, sms, indices=None)
        cache = self.index.cache.unsqueeze(2)
        logits = deep_gemm.fp8_fp4_paged_mqa_logits(
            (self.q, None), cache, self.weights, self.each, self.index.table, self.plan, self.columns
        )
        selected = self.buffer[:-1, : self.k]
        adapters.topk_decode(logits, self.each, self.next_n, selected, self.k)
        pages = self.index.table[self.of[:, None], selected.clamp(min=0) // PAGE]
        slots = torch.where(selected < 0, -1, pages * PAGE + selected.clamp(min=0) % PAGE)
        out, lse = adapters.fp8_attention(
            self.queries, self.keys, slots.view(len(self.each), self.next_n, self.k), 576**-0.5
        )
        return selected, out, lse
