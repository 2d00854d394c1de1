"""Ops that are wrong, each in a way that its self test must notice: in what they return, or in what they are given."""

import inspect

import torch

import dsa
from dsa import reference
from dsa.cases import CASES
from dsa.ops import op_modules
from tests.public_names import ops_of


def damaged(x):
    """1 % too large; in 8 bits, where that would be rounded away, 25 %. Integers, such as indices and bytes, are off by
    one."""
    if not x.dtype.is_floating_point:
        return x + 1
    return x * 1.01 if x.element_size() > 1 else (x.float() * 1.25).to(x.dtype)


def wrong_result(position):
    """The result, or the one at that position of the results, is damaged."""

    def wrong(result, arguments):
        if not isinstance(result, tuple):
            return damaged(result)
        damage = [i == position and isinstance(x, torch.Tensor) for i, x in enumerate(result)]
        return tuple(damaged(x) if here else x for x, here in zip(result, damage))

    return wrong


def only_if(option, wrong, value=True):
    """Wrong in the calls with (or without) that option."""
    return lambda result, arguments: wrong(result, arguments) if arguments.get(option, False) is value else result


def swapped(result, arguments):
    """Swap the first two selected indices."""
    indices, *values = result if isinstance(result, tuple) else (result,)
    indices = indices[:, [1, 0, *range(2, indices.shape[1])]]
    return (indices, *values) if values else indices


def last_of_equals(result, arguments):
    """Ties go to the highest index of each row."""
    scores, k, starts = (arguments[name] for name in ("scores", "k", "starts"))
    column = torch.arange(scores.shape[1])
    begins = torch.zeros(len(scores)) if starts is None else starts
    ends = begins + arguments["lengths"]
    there = (column >= begins[:, None]) & (column < ends[:, None])
    descending = scores.masked_fill(~there, -torch.inf).flip(1).sort(descending=True, stable=True).indices
    selected = (scores.shape[1] - 1 - descending[:, :k]).sort().values - begins[:, None].long()
    return selected.int(), *result[1:]


def unmasked(result, arguments):
    return result.masked_fill(result == -torch.inf, 0.0)


def larger_first_row(result, arguments):
    return torch.cat((result[:1] * 1.01, result[1:]))


def shifted_lse(position):
    """As with a base-2 logarithm, or a sum that misses keys."""
    return lambda result, arguments: tuple(x + 0.01 if i == position else x for i, x in enumerate(result))


def empty_rows(position, value):
    """Rows without keys give something else than the contract's value."""

    def wrong(result, arguments):
        changed = list(result)
        changed[position] = torch.cat((result[position][:1], torch.full_like(result[position][1:], value)))
        return tuple(changed)

    return wrong


def without_infinity(result, arguments):
    return result[0], result[1].nan_to_num(posinf=0.0)


def steeper(position):
    """The same numbers with gradients 1 % too large."""

    def wrong(result, arguments):
        changed = list(result)
        x = result[position]
        changed[position] = x.detach() + (x - x.detach()) * 1.01
        return tuple(changed)

    return wrong


def without_sink(result, arguments):
    """The first head, which the sink is to halve, is whole."""
    return torch.cat((result[0][:, :1] * 2, result[0][:, 1:]), 1), result[1]


def without_limit(result, arguments):
    return reference.swiglu_cast_to_fp8(**arguments | {"limit": None})


def without_experts_limit(result, arguments):
    return reference.grouped_fp8_gemm_swiglu(**arguments | {"limit": None})


def without_shared(result, arguments):
    return result - arguments["shared"] if arguments["shared"] is not None else result


def next_key(result, arguments):
    """Every list begins one key late."""
    return torch.cat((result[..., 1:], torch.full_like(result[..., :1], -1)), -1)


def disturbed(key, dtype):
    """What is written into that argument, where it is of that dtype, is too large."""

    def wrong(result, arguments):
        written = arguments.get(key)
        if written is not None and written.dtype == dtype:
            written.copy_(written * 1.01)
        return result

    return wrong


# Damage of kinds that GENERAL below does not have: the self test that fails, the function that is wrong, and how.
def reversed_order_of_many(result, arguments):
    """Entries of more tokens than one CTA sorts come in the opposite order."""
    many = len(arguments["x"]) > 8
    return (*result[:2], result[2].flip(0), *result[3:]) if many else result


WRONG = {
    "cast": ("per_token_cast_to_fp8", "per_token_cast_to_fp8", only_if("hadamard", wrong_result(1), False)),
    "Hadamard": ("per_token_cast_to_fp8", "per_token_cast_to_fp8", only_if("hadamard", wrong_result(1))),
    "product's first row": ("fp8_gemm_nt", "fp8_gemm_nt", larger_first_row),
    "training's selection": ("indexer_topk", "indexer_topk", next_key),
    "training's sparse lse": ("sparse_mla_attention", "sparse_mla_attention", shifted_lse(1)),
    "training's lse of empty rows": ("sparse_mla_attention", "sparse_mla_attention", without_infinity),
    "training's sparse gradients": ("sparse_mla_attention", "sparse_mla_attention", steeper(0)),
    "gate's experts": ("expert_routing", "moe_gate", lambda r, a: (15 - r[0], r[1])),
    "order of entries": ("expert_routing", "sort_by_expert", lambda r, a: (r[0].flip(0), *r[1:])),
    "rows of entries": ("expert_routing", "sort_by_expert", lambda r, a: (r[0], r[1].abs(), r[2])),
    "order of many tokens' entries": ("route_to_experts", "route_to_experts", reversed_order_of_many),
    "scales of up-projected values": (
        "mla_values_cast_to_fp8",
        "mla_values_cast_to_fp8",
        lambda r, a: (r[0], 3 * r[1]),
    ),
    "SwiGLU without the limit": ("swiglu_cast_to_fp8", "swiglu_cast_to_fp8", without_limit),
    "experts' SwiGLU without the limit": (
        *("grouped_fp8_gemm_swiglu", "grouped_fp8_gemm_swiglu"),
        without_experts_limit,
    ),
    "FP4 product's first row": ("fp8_fp4_gemm_nt", "grouped_fp8_fp4_gemm_nt", larger_first_row),
    "experts' first row": ("combine_experts", "combine_experts", larger_first_row),
    "experts' sum without the shared one": ("combine_experts", "combine_experts", without_shared),
    "logits' mask": ("fp8_mqa_logits", "fp8_mqa_logits", unmasked),
    "paged logits' mask": ("fp8_paged_mqa_logits", "fp8_paged_mqa_logits", unmasked),
    "cached latents": ("mla_cache_inputs", "write_mla_cache", disturbed("cache", torch.bfloat16)),
    "cached FP8 latents": ("mla_cache_inputs", "write_mla_cache", disturbed("cache", torch.uint8)),
    "compressed entries": ("compressed_kv", "write_compressed_kv", disturbed("cache", torch.bfloat16)),
    "compressed FP8 entries": ("compressed_kv", "write_compressed_kv", disturbed("cache", torch.uint8)),
    "top-k order": ("topk_indices", "topk_indices", swapped),
    "top-k ties": ("topk_indices", "topk_indices", last_of_equals),
    "dense decode": (
        "flash_mla_with_kvcache",
        "flash_mla_with_kvcache",
        only_if("is_fp8_kvcache", wrong_result(0), False),
    ),
    "dense lse": ("flash_mla_with_kvcache", "flash_mla_with_kvcache", only_if("is_fp8_kvcache", shifted_lse(1), False)),
    "sparse decode": ("flash_mla_with_kvcache", "flash_mla_with_kvcache", only_if("is_fp8_kvcache", wrong_result(0))),
    "sparse lse": ("flash_mla_with_kvcache", "flash_mla_with_kvcache", only_if("is_fp8_kvcache", shifted_lse(1))),
    "prefill max_logits": ("flash_mla_sparse_fwd", "flash_mla_sparse_fwd", shifted_lse(1)),
    "prefill lse": ("flash_mla_sparse_fwd", "flash_mla_sparse_fwd", shifted_lse(2)),
    "prefill, empty rows": ("flash_mla_sparse_fwd", "flash_mla_sparse_fwd", empty_rows(0, torch.nan)),
    "prefill, lse of empty rows": ("flash_mla_sparse_fwd", "flash_mla_sparse_fwd", empty_rows(2, -torch.inf)),
    "window's keys": ("window_indices", "window_indices", next_key),
    "window's slots": ("window_indices", "window_slots", next_key),
    "ring's slots": ("window_indices", "window_slots", only_if("block_table", next_key, None)),
    "window lse": ("sliding_window_attention", "sliding_window_attention", shifted_lse(1)),
    "window in a ring": (
        *("sliding_window_attention", "sliding_window_decode"),
        only_if("block_table", wrong_result(0), None),
    ),
    "window in a cache, lse": ("sliding_window_attention", "sliding_window_decode", shifted_lse(1)),
    "window and selected, lse": ("sliding_window_attention", "window_sparse_attention", shifted_lse(1)),
    "window and selected without the sink": ("sliding_window_attention", "window_sparse_attention", without_sink),
    "merged lse": ("merge_attention", "merge_attention", shifted_lse(1)),
    "merge, empty rows": ("merge_attention", "merge_attention", empty_rows(0, torch.nan)),
    "merge, lse of empty rows": ("merge_attention", "merge_attention", empty_rows(1, -torch.inf)),
    "merge without the sink": ("merge_attention", "merge_attention", without_sink),
    "rotation": ("rotary", "apply_rotary", only_if("out", wrong_result(0), None)),
    "norm": ("rms_norm", "rms_norm", only_if("weight", wrong_result(0), None)),
    "weighted norm": ("rms_norm", "rms_norm", larger_first_row),
}


def wrong_argument(name):
    """What the op has written to that argument is damaged, where it was given."""

    def wrong(result, arguments):
        if arguments.get(name) is not None:
            arguments[name].copy_(damaged(arguments[name]))
        return result

    return wrong


def general():
    """Every result of every op, and every argument that it writes to, in the same form as WRONG."""
    found = {}
    for op, bridge in op_modules().items():
        for function in ops_of(bridge):
            calls = [call for call in CASES if call.op == function]
            # What an op without a valid call misses, tests of valid calls say; here it is taken to return one tensor.
            for i in range(max((len(call.run(call.arguments())) for call in calls), default=1)):
                found[f"{function}, result {i}"] = (op, function, wrong_result(i))
            for name in sorted({name for call in calls for name in call.written}):
                found[f"{function}, {name}"] = (op, function, wrong_argument(name))
    return found


GENERAL = general()
# What no self test can notice on a CPU.
UNNOTICED = {}


def break_op(monkeypatch, function, wrong):
    """wrong: (result, arguments by name and by position) -> another result."""
    correct = getattr(dsa, function)
    parameters = inspect.signature(correct)

    def op(*args, **kwargs):
        named = parameters.bind(*args, **kwargs).arguments
        return wrong(correct(*args, **kwargs), {**named, **dict(enumerate(args)), **kwargs})

    monkeypatch.setattr(dsa, function, op)


def shifted(index):
    """Each key's successor."""
    return torch.where(index >= 0, index + 1, index)


def without_first(index):
    return torch.cat((torch.full_like(index[..., :1], -1), index[..., 1:]), -1)


def without_last(count):
    return lambda index: torch.cat((index[..., :-count], torch.full_like(index[..., -count:], -1)), -1)


def one_less(lengths):
    return lengths - 1


def one_percent(number):
    return number * 1.01


def one_percent_in_a_block(pair):
    scale = pair[1].clone()
    scale[0, 0] *= 1.01
    return pair[0], scale


def first_end_off_by(count):
    return lambda ends: ends + count * (ends == ends[0]).int()


def without_last_block(pair):
    q = pair[0].clone()
    q[:, -128:] = 0
    return q, pair[1]


DENSE, SPARSE = {"indices": None}, {"is_fp8_kvcache": True}
# What fails: the self test, the function, which of its arguments it gets wrong and how, and in which calls.
MISLED = {
    "dense decode, a key too few": (
        *("flash_mla_with_kvcache", "flash_mla_with_kvcache", "cache_seqlens", one_less),
        DENSE,
    ),
    "dense decode, without the last tile": (
        *("flash_mla_with_kvcache", "flash_mla_with_kvcache", "cache_seqlens", lambda n: n - n % 64),
        DENSE,
    ),
    "sparse decode, keys off by one": ("flash_mla_with_kvcache", "flash_mla_with_kvcache", "indices", shifted, SPARSE),
    "sparse decode, a key too few": (
        *("flash_mla_with_kvcache", "flash_mla_with_kvcache", "indices", without_first),
        SPARSE,
    ),
    "sparse decode, without the last tile": (
        *("flash_mla_with_kvcache", "flash_mla_with_kvcache", "indices", without_last(36)),
        SPARSE,
    ),
    "prefill's scale": ("flash_mla_sparse_fwd", "flash_mla_sparse_fwd", "sm_scale", one_percent, {}),
    "prefill, keys off by one": ("flash_mla_sparse_fwd", "flash_mla_sparse_fwd", "indices", shifted, {}),
    "prefill, a key too few": ("flash_mla_sparse_fwd", "flash_mla_sparse_fwd", "indices", without_first, {}),
    "prefill, without the last tile": ("flash_mla_sparse_fwd", "flash_mla_sparse_fwd", "indices", without_last(32), {}),
    "training's scale": ("sparse_mla_attention", "sparse_mla_attention", "softmax_scale", one_percent, {}),
    "training, a key too few": ("sparse_mla_attention", "sparse_mla_attention", "indices", without_first, {}),
    "window, a key too few": ("sliding_window_attention", "sliding_window_attention", "window", one_less, {}),
    "window's scale": ("sliding_window_attention", "sliding_window_attention", "softmax_scale", one_percent, {}),
    "window in a cache, a key too few": ("sliding_window_attention", "sliding_window_decode", "window", one_less, {}),
    "window and selected, a key too few": (
        *("sliding_window_attention", "window_sparse_attention", "indices", without_first),
        {},
    ),
    "window with a cast, a key too few": (
        "window_attention_cast",
        "window_attention_cast_to_fp8",
        "indices",
        without_first,
        {},
    ),
    "window with a cast, turned the other way": (
        *("window_attention_cast", "window_attention_cast_to_fp8", "sin", lambda sin: -sin),
        {},
    ),
    "window with a cast, the sink of another head": (
        *("window_attention_cast", "window_attention_cast_to_fp8", "attn_sink", lambda sink: sink.roll(1)),
        {},
    ),
    "product, a block's scale": ("fp8_gemm_nt", "fp8_gemm_nt", "a", one_percent_in_a_block, {}),
    "product, without the last block": ("fp8_gemm_nt", "fp8_gemm_nt", "a", without_last_block, {}),
    "grouped product, a block's scale": ("fp8_gemm_nt", "grouped_fp8_gemm_nt", "a", one_percent_in_a_block, {}),
    "grouped product, a row off": ("fp8_gemm_nt", "grouped_fp8_gemm_nt", "ends", first_end_off_by(-1), {}),
    "FP4 product, a row off": ("fp8_fp4_gemm_nt", "grouped_fp8_fp4_gemm_nt", "ends", first_end_off_by(1), {}),
    "experts' rows": ("grouped_fp8_gemm_swiglu", "grouped_fp8_gemm_swiglu", "rows", lambda rows: rows.flip(0), {}),
    "logits, a key too few": ("fp8_mqa_logits", "fp8_mqa_logits", "cu_seq_len_k_end", one_less, {}),
    "logits' weights": ("fp8_mqa_logits", "fp8_mqa_logits", "weights", one_percent, {}),
    "paged logits, a key too few": ("fp8_paged_mqa_logits", "fp8_paged_mqa_logits", "context_lens", one_less, {}),
    "selection of pages, a key too few": ("paged_indexer_select", "paged_indexer_select", "context_lens", one_less, {}),
    "warm-up's scale": ("indexer_warmup_attention", "indexer_warmup_attention", "softmax_scale", one_percent, {}),
    "sparse loss, a key too few": ("sparse_indexer_loss", "sparse_indexer_loss", "indices", without_first, {}),
    "sparse loss' scale": ("sparse_indexer_loss", "sparse_indexer_loss", "softmax_scale", one_percent, {}),
}


def mislead_op(monkeypatch, function, argument, change, options):
    """An op that takes one of its arguments for another one."""
    correct = getattr(dsa, function)

    def op(*args, **kwargs):
        if any(kwargs.get(name, False) is not value for name, value in options.items()):
            return correct(*args, **kwargs)
        if isinstance(argument, int):
            return correct(*args[:argument], change(args[argument]), *args[argument + 1 :], **kwargs)
        return correct(*args, **{**kwargs, argument: change(kwargs[argument])})

    monkeypatch.setattr(dsa, function, op)
