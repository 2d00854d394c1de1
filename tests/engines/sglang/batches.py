"""Small batches as SGLang passes them to its attention backends. Expected results are computed without the ops."""

import math
from types import SimpleNamespace

import torch

import dsa

INT32, BF16, E4M3, U8 = torch.int32, torch.bfloat16, torch.float8_e4m3fn, torch.uint8
PAGE = 64


def int32(values, device="cpu"):
    return torch.tensor(values, dtype=INT32, device=device)


def paged(lengths, device="cpu"):
    """Return (page table int32 [B, pages], total number of pages). The pages are in random order."""
    width = max(-(-length // PAGE) for length in lengths)
    pages = torch.randperm(len(lengths) * width, device=device).to(INT32)
    return pages.view(len(lengths), width), len(pages)


def slots_of(table, sequence, length):
    position = torch.arange(length, device=table.device)
    return table[sequence, position // PAGE].long() * PAGE + position % PAGE


def scores(rows, columns, device="cpu"):
    """Return fp32 scores [rows, columns] with many ties. Rows begin at multiples of 1024 bytes."""
    values = torch.randint(-4, 5, (rows, -(-columns // 256) * 256), device=device).float()
    return values[:, :columns]


def selected(row, k):
    """Return the positions of the k largest numbers of `row`, ascending, padded with -1. Among equal numbers, the
    lowest positions are selected."""
    values = row.tolist()
    best = sorted(sorted(range(len(values)), key=lambda s: (-values[s], s))[:k])
    return best + [-1] * (k - len(best))


def decode_metadata(lengths, device="cpu"):
    """Return (logits, lengths, metadata, expected) of a decoding step with one token per sequence. expected(k) returns
    slots [B, k]."""
    table, _ = paged(lengths, device)
    logits = scores(len(lengths), table.shape[1] * PAGE, device)
    metadata = SimpleNamespace(real_page_table=table, page_size=PAGE, token_to_batch_idx=None, page_table_1=None)

    def expected(k):
        rows = []
        for b, length in enumerate(lengths):
            slots = slots_of(table, b, length).tolist()
            rows.append([-1 if s < 0 else slots[s] for s in selected(logits[b, :length], k)])
        return int32(rows, device)

    return logits, int32(lengths, device), metadata, expected


def prefill_metadata(prefixes, lengths, device="cpu"):
    """Return (logits, visible keys per token, starts, metadata, expected) of a prefill batch.

    The new tokens of sequence b are prefixes[b] to lengths[b] - 1. A token sees the keys up to its own. A sequence's
    keys are adjacent columns of logits, and `starts` has the first of them for each token. expected(k) returns
    positions, counted from the sequence's first key.
    """
    owners = [b for b, (prefix, length) in enumerate(zip(prefixes, lengths)) for _ in range(prefix, length)]
    visible = [s + 1 for prefix, length in zip(prefixes, lengths) for s in range(prefix, length)]
    begins = [sum(lengths[:b]) for b in owners]
    logits = scores(len(owners), sum(lengths), device)
    table, _ = paged(lengths, device)
    metadata = SimpleNamespace(
        real_page_table=table,
        page_size=PAGE,
        token_to_batch_idx=int32(owners, device),
        topk_indices_offset=int32(begins, device),
    )

    def expected(k):
        return [selected(logits[r, begin : begin + n], k) for r, (begin, n) in enumerate(zip(begins, visible))]

    return logits, int32(visible, device), int32(begins, device), metadata, expected


def latent_cache(width, pages, device="cpu"):
    """Return (a cache [pages, 64, 1, width]; its keys, fp32 [pages * 64, d]). width: bytes per key, or 576 for bf16
    keys of 576 channels.

    The keys are read back from the cache, because FP8 rounds them.
    """
    dim = 512 if width == 584 else 576
    rows = torch.randn(pages * PAGE, dim, device=device).to(BF16)
    if width == 576:
        cache = torch.zeros_like(rows).view(pages, PAGE, 1, 576)
    else:
        # SGLang pads a page of 584 bytes per key to a multiple of 576 bytes.
        stride = -(-PAGE * width // 576) * 576 if width == 584 else PAGE * width
        cache = torch.zeros(pages, stride, dtype=U8, device=device)[:, : PAGE * width].view(pages, PAGE, 1, width)
    slots = torch.arange(pages * PAGE, dtype=INT32, device=device)
    dsa.write_kv_cache(rows, cache, slots)
    return cache, dsa.read_kv_cache(cache, slots)


def attention(q, rows, indices, scale, sink=None, more=None):
    """Return (out [T, h, 512], max_logits [T, h], lse [T, h]) in float64: attention of q [T, h, d] to rows[indices].

    sink [h] scales `out` and is not included in `lse`. more: (rows, indices) of a second list of keys. A query without
    keys has out 0, max_logits -inf and lse inf.
    """
    keys = [rows.double()[index[index >= 0].long()] for index in indices]
    if more is not None:
        keys = [torch.cat([k, more[0].double()[i[i >= 0].long()]]) for k, i in zip(keys, more[1])]
    outs, tops, lses = [], [], []
    for query, key in zip(q.double(), keys):
        logits = scale * query @ key.T
        lse = logits.logsumexp(1) if key.shape[0] else query.new_full((len(query),), -math.inf)
        weights = (logits - lse[:, None]).exp()
        if sink is not None:
            weights = weights * (lse - torch.logaddexp(lse, sink.double())).exp()[:, None]
        outs.append(weights @ key[:, :512])
        tops.append(logits.amax(1) if key.shape[0] else lse)
        lses.append(lse if key.shape[0] else -lse)
    return torch.stack(outs), torch.stack(tops), torch.stack(lses)


def index_keys(count, device="cpu"):
    k, scale = dsa.per_token_cast_to_fp8(torch.randn(count, 128, device=device).to(BF16))
    return k, scale.squeeze(1).contiguous()


def index_scores(q, k, k_scale, weights):
    """Return float64 [T, keys]: k_scale[s] sum_h weights[t, h] relu(q[t, h] . k[s]), for q [T, H, 128]."""
    dots = torch.einsum("thd,sd->ths", q.double(), k.double()).relu()
    return torch.einsum("ths,th->ts", dots, weights.double()) * k_scale.double()
