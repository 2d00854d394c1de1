"""Ops that are wrong, each in a way that its self test must notice: in what they return, or in what they are given."""

import inspect

import torch

import dsa
from dsa import reference
from dsa.cases import CASES
from dsa.ops import op_modules
from tests.public_names import ops_of

# {function: the op whose self test runs it}
OP_OF = {function: op for op, module in op_modules().items() for function in ops_of(module)}


def damaged(x):
    """1 % too large; in 8 bits, where that would be rounded away, 25 %. Integers, such as indices and bytes, are off by
    one."""
    if not x.dtype.is_floating_point:
        return x + 1
    return x * 1.01 if x.element_size() > 1 else (x.float() * 1.25).to(x.dtype)


# Functions of (result, arguments by name and by position) that return another result, and functions that make them.


def changed_at(position, change):
    """Change the result, or the tensor at that position of the results."""

    def wrong(result, arguments):
        if not isinstance(result, tuple):
            return change(result)
        here = [i == position and isinstance(x, torch.Tensor) for i, x in enumerate(result)]
        return tuple(change(x) if changes else x for x, changes in zip(result, here))

    return wrong


def wrong_result(position):
    return changed_at(position, damaged)


def wrong_argument(name):
    """Damage what the op has written to that argument."""

    def wrong(result, arguments):
        if arguments.get(name) is not None:
            arguments[name].copy_(damaged(arguments[name]))
        return result

    return wrong


def only_if(option, wrong, value=True):
    """Wrong in the calls with (or without) that option."""
    return lambda result, arguments: wrong(result, arguments) if arguments.get(option, False) is value else result


def if_cache_is(dtype):
    def wrong(result, arguments):
        fits = arguments.get("cache") is not None and arguments["cache"].dtype == dtype
        return wrong_argument("cache")(result, arguments) if fits else result

    return wrong


def shifted_lse(position):
    """As with a base-2 logarithm, or a sum that misses keys."""
    return changed_at(position, lambda x: x + 0.01)


def empty_rows(position, value):
    """Rows without keys give something else than the contract's value."""
    return changed_at(position, lambda x: torch.cat((x[:1], torch.full_like(x[1:], value))))


def steeper(position):
    """The same numbers with gradients 1 % too large."""
    return changed_at(position, lambda x: x.detach() + (x - x.detach()) * 1.01)


def without_limit(function):
    return lambda result, arguments: getattr(reference, function)(**arguments | {"limit": None})


larger_first_row = changed_at(0, lambda x: torch.cat((x[:1] * 1.01, x[1:])))
next_key = changed_at(0, lambda x: torch.cat((x[..., 1:], torch.full_like(x[..., :1], -1)), -1))
unmasked = changed_at(0, lambda x: x.masked_fill(x == -torch.inf, 0.0))
swapped = changed_at(0, lambda x: x[:, [1, 0, *range(2, x.shape[1])]])
without_infinity = changed_at(1, lambda x: x.nan_to_num(posinf=0.0))
# The sink halves the first head.
without_sink = changed_at(0, lambda x: torch.cat((x[:, :1] * 2, x[:, 1:]), 1))


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


def reversed_order_of_many(result, arguments):
    """Entries of more tokens than one CTA sorts come in the opposite order."""
    many = len(arguments["x"]) > 8
    return (*result[:2], result[2].flip(0), *result[3:]) if many else result


def general():
    """Every result of every op, and every argument that it writes to, in the same form as WRONG."""
    found = {}
    for function in OP_OF:
        calls = [call for call in CASES if call.op == function]
        # Tests of valid calls report an op without one; here it is taken to return one tensor.
        for i in range(max((len(call.run(call.arguments())) for call in calls), default=1)):
            found[f"{function}, result {i}"] = (function, wrong_result(i))
        for name in sorted({name for call in calls for name in call.written}):
            found[f"{function}, {name}"] = (function, wrong_argument(name))
    return found


# {what is wrong: (function, how)}
WRONG = general() | {
    "cast": ("per_token_cast_to_fp8", only_if("hadamard", wrong_result(1), False)),
    "Hadamard": ("per_token_cast_to_fp8", only_if("hadamard", wrong_result(1))),
    "product's first row": ("fp8_gemm_nt", larger_first_row),
    "training's selection": ("indexer_topk", next_key),
    "training's sparse lse": ("sparse_mla_attention", shifted_lse(1)),
    "training's lse of empty rows": ("sparse_mla_attention", without_infinity),
    "training's sparse gradients": ("sparse_mla_attention", steeper(0)),
    "order of entries": ("sort_by_expert", changed_at(0, lambda x: x.flip(0))),
    "rows of entries": ("sort_by_expert", changed_at(1, torch.abs)),
    "order of many tokens' entries": ("route_to_experts", reversed_order_of_many),
    "SwiGLU without the limit": ("swiglu_cast_to_fp8", without_limit("swiglu_cast_to_fp8")),
    "experts' SwiGLU without the limit": ("grouped_fp8_gemm_swiglu", without_limit("grouped_fp8_gemm_swiglu")),
    "FP4 product's first row": ("grouped_fp8_fp4_gemm_nt", larger_first_row),
    "experts' first row": ("combine_experts", larger_first_row),
    "experts' sum without the shared one": (
        "combine_experts",
        lambda result, arguments: result if arguments["shared"] is None else result - arguments["shared"],
    ),
    "logits' mask": ("fp8_mqa_logits", unmasked),
    "paged logits' mask": ("fp8_paged_mqa_logits", unmasked),
    "cached latents": ("write_mla_cache", if_cache_is(torch.bfloat16)),
    "cached FP8 latents": ("write_mla_cache", if_cache_is(torch.uint8)),
    "compressed entries": ("write_compressed_kv", if_cache_is(torch.bfloat16)),
    "compressed FP8 entries": ("write_compressed_kv", if_cache_is(torch.uint8)),
    "top-k order": ("topk_indices", swapped),
    "top-k ties": ("topk_indices", last_of_equals),
    "dense decode": ("flash_mla_with_kvcache", only_if("is_fp8_kvcache", wrong_result(0), False)),
    "dense lse": ("flash_mla_with_kvcache", only_if("is_fp8_kvcache", shifted_lse(1), False)),
    "sparse decode": ("flash_mla_with_kvcache", only_if("is_fp8_kvcache", wrong_result(0))),
    "sparse lse": ("flash_mla_with_kvcache", only_if("is_fp8_kvcache", shifted_lse(1))),
    "prefill max_logits": ("flash_mla_sparse_fwd", shifted_lse(1)),
    "prefill lse": ("flash_mla_sparse_fwd", shifted_lse(2)),
    "prefill, empty rows": ("flash_mla_sparse_fwd", empty_rows(0, torch.nan)),
    "prefill, lse of empty rows": ("flash_mla_sparse_fwd", empty_rows(2, -torch.inf)),
    "window's keys": ("window_indices", next_key),
    "window's slots": ("window_slots", next_key),
    "ring's slots": ("window_slots", only_if("block_table", next_key, None)),
    "window lse": ("sliding_window_attention", shifted_lse(1)),
    "window in a ring": ("sliding_window_decode", only_if("block_table", wrong_result(0), None)),
    "window in a cache, lse": ("sliding_window_decode", shifted_lse(1)),
    "window and selected, lse": ("window_sparse_attention", shifted_lse(1)),
    "window and selected without the sink": ("window_sparse_attention", without_sink),
    "merged lse": ("merge_attention", shifted_lse(1)),
    "merge, empty rows": ("merge_attention", empty_rows(0, torch.nan)),
    "merge, lse of empty rows": ("merge_attention", empty_rows(1, -torch.inf)),
    "merge without the sink": ("merge_attention", without_sink),
    "rotation": ("apply_rotary", only_if("out", wrong_result(0), None)),
    "norm": ("rms_norm", only_if("weight", wrong_result(0), None)),
    "weighted norm": ("rms_norm", larger_first_row),
}


def break_op(monkeypatch, function, wrong):
    correct = getattr(dsa, function)
    parameters = inspect.signature(correct)

    def op(*args, **kwargs):
        named = parameters.bind(*args, **kwargs).arguments
        return wrong(correct(*args, **kwargs), {**named, **dict(enumerate(args)), **kwargs})

    monkeypatch.setattr(dsa, function, op)


# Functions that change an argument.


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


# {what is wrong: (function, argument that it gets wrong, how, options of the calls: all calls without them)}
DENSE, SPARSE = {"indices": None}, {"is_fp8_kvcache": True}
MISLED = {
    "dense decode, a key too few": ("flash_mla_with_kvcache", "cache_seqlens", one_less, DENSE),
    "dense decode, a tile too few": ("flash_mla_with_kvcache", "cache_seqlens", lambda n: n - n % 64, DENSE),
    "sparse decode, keys off by one": ("flash_mla_with_kvcache", "indices", shifted, SPARSE),
    "sparse decode, a key too few": ("flash_mla_with_kvcache", "indices", without_first, SPARSE),
    "sparse decode, a tile too few": ("flash_mla_with_kvcache", "indices", without_last(36), SPARSE),
    "prefill's scale": ("flash_mla_sparse_fwd", "sm_scale", one_percent),
    "prefill, keys off by one": ("flash_mla_sparse_fwd", "indices", shifted),
    "prefill, a key too few": ("flash_mla_sparse_fwd", "indices", without_first),
    "prefill, a tile too few": ("flash_mla_sparse_fwd", "indices", without_last(32)),
    "training's scale": ("sparse_mla_attention", "softmax_scale", one_percent),
    "training, a key too few": ("sparse_mla_attention", "indices", without_first),
    "window, a key too few": ("sliding_window_attention", "window", one_less),
    "window's scale": ("sliding_window_attention", "softmax_scale", one_percent),
    "window in a cache, a key too few": ("sliding_window_decode", "window", one_less),
    "window and selected, a key too few": ("window_sparse_attention", "indices", without_first),
    "window with a cast, a key too few": ("window_attention_cast_to_fp8", "indices", without_first),
    "window with a cast, turned the other way": ("window_attention_cast_to_fp8", "sin", lambda sin: -sin),
    "window with a cast, another head's sink": ("window_attention_cast_to_fp8", "attn_sink", lambda x: x.roll(1)),
    "product, a block's scale": ("fp8_gemm_nt", "a", one_percent_in_a_block),
    "product, without the last block": ("fp8_gemm_nt", "a", without_last_block),
    "grouped product, a block's scale": ("grouped_fp8_gemm_nt", "a", one_percent_in_a_block),
    "grouped product, a row off": ("grouped_fp8_gemm_nt", "ends", first_end_off_by(-1)),
    "FP4 product, a row off": ("grouped_fp8_fp4_gemm_nt", "ends", first_end_off_by(1)),
    "experts' rows": ("grouped_fp8_gemm_swiglu", "rows", lambda rows: rows.flip(0)),
    "logits, a key too few": ("fp8_mqa_logits", "cu_seq_len_k_end", one_less),
    "logits' weights": ("fp8_mqa_logits", "weights", one_percent),
    "paged logits, a key too few": ("fp8_paged_mqa_logits", "context_lens", one_less),
    "selection of pages, a key too few": ("paged_indexer_select", "context_lens", one_less),
    "warm-up's scale": ("indexer_warmup_attention", "softmax_scale", one_percent),
    "sparse loss, a key too few": ("sparse_indexer_loss", "indices", without_first),
    "sparse loss' scale": ("sparse_indexer_loss", "softmax_scale", one_percent),
}


def mislead_op(monkeypatch, function, argument, change, options=()):
    """Make an op take one of its arguments for another one."""
    correct = getattr(dsa, function)

    def op(*args, **kwargs):
        if any(kwargs.get(name, False) is not value for name, value in dict(options).items()):
            return correct(*args, **kwargs)
        return correct(*args, **{**kwargs, argument: change(kwargs[argument])})

    monkeypatch.setattr(dsa, function, op)
