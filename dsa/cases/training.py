"""Cases of the training ops (attention and the indexer's losses in the warm-up and sparse stages), including their
gradients."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from dsa.cases.case import BF16, F32, INT32, Case, Given, Hostile, Kept, Maker, Results
from dsa.testing import assert_close

F64, D_V = torch.float64, 512
INDEXER = ("q_idx", "k_idx", "w_idx")


@dataclass(frozen=True)
class Trained(Case):
    """A case whose results are followed by the gradients of all arguments that require gradients. The function
    `upstream` makes the gradients of the results.

    of  positions of the results through which gradients flow
    """

    of: tuple[int, ...] = (0,)

    def results(self, arguments: Given) -> list[torch.Tensor]:
        given = with_leaves(arguments)
        found = self.run(given)
        gradients = gradients_of([found[i] for i in self.of], given)
        return [*(x.detach() for x in found), *gradients]


def leaves_of(given: Given) -> dict[str, torch.Tensor]:
    return {name: x for name, x in given.items() if isinstance(x, torch.Tensor) and x.requires_grad and x.is_leaf}


def with_leaves(given: Given, dtype: torch.dtype | None = None) -> Given:
    """Return the arguments with new autograd leaves. dtype: the dtype of all float tensors; None: unchanged. If v is
    the first channels of k (`absorbed`), the returned v is a view of the returned k."""
    fresh = dict(given)
    for name, x in given.items():
        if isinstance(x, torch.Tensor) and x.is_floating_point():
            fresh[name] = x.detach().to(dtype or x.dtype).requires_grad_(x.requires_grad)
    if "v" in given and absorbed((given["k"].shape[2], given["v"].shape[2])):
        fresh["v"] = fresh["k"][..., :D_V]
    return fresh


def absorbed(dims: tuple[int, int]) -> bool:
    """Return whether the values are the first channels of the keys. dims: channels of keys and values."""
    return dims == (576, D_V)


def upstream(x: torch.Tensor) -> torch.Tensor:
    """Return pseudo-random gradients that depend only on x's shape and dtype. They are from 0.5 to 1.5 if x has one
    dimension (a loss per token), else from -1 to 1."""
    noise = (torch.arange(x.numel(), dtype=F64, device=x.device) * 12.9898).sin() * 43758.5453
    noise = (noise - noise.floor()).view(x.shape)
    return (noise + 0.5 if x.dim() == 1 else 2 * noise - 1).to(BF16).to(x.dtype)


def gradients_of(outputs: Results, given: Given) -> list[torch.Tensor]:
    leaves, outputs = leaves_of(given), [x for x in outputs if x.requires_grad]
    if not leaves:
        return []
    return [*torch.autograd.grad(outputs, [*leaves.values()], [upstream(x) for x in outputs])]


def distance(got: torch.Tensor, expected: torch.Tensor, least: float = 0.0) -> float:
    """Return the norm of the error relative to the norm of `expected`, or to `least` if that is larger."""
    norm = expected.double().norm().item()
    error = (got.double() - expected.double()).norm().item()
    return error / max(norm, least) if max(norm, least) else error


def check_distance(name: str, got: torch.Tensor, expected: torch.Tensor, most: float, least: float = 0.0) -> float:
    if got.shape != expected.shape:
        raise AssertionError(f"{name}: expected shape {list(expected.shape)}, got {list(got.shape)}")
    error = distance(got, expected, least)
    if not error <= most:
        raise AssertionError(f"{name}: relative error {error:.3g}, at most {most:.3g}")
    return error


def floats(new: Maker, *shape: int, dtype: torch.dtype = BF16, size: float = 1.0) -> torch.Tensor:
    return (new.f32(*shape) * size).to(dtype)


def ask(given: Given, leaves: Sequence[str]) -> Given:
    for name in leaves:
        if given[name] is not None:
            given[name].requires_grad_()
    return given


def lists(new: Maker, tokens: int, keys: int, k: int, invalid: float) -> torch.Tensor:
    """Return int32 [tokens, 1, k]: random keys, possibly repeated. The fraction `invalid` of them is replaced by
    indices that name no key."""
    indices = new.below(max(keys, 1), tokens, 1, k)
    bad = new.ints([-1, keys, -(2**31), 2**31 - 1, keys + 1, -2])[new.below(6, tokens, 1, k).long()]
    drawn = torch.rand(indices.shape, generator=new.generator, device=new.device)
    indices = torch.where(drawn < (invalid if keys else 1.0), bad, indices)
    if tokens > 4 and invalid:
        indices[-1], indices[-2] = -1, keys // 2
    return indices


def rows_of(x: torch.Tensor, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (rows [T, K, D], valid [T, K]). rows are the rows of x that `indices` select, zeros for invalid
    indices."""
    index = indices[:, 0].long()
    valid = (index >= 0) & (index < len(x))
    return torch.nn.functional.pad(x, (0, 0, 0, 1))[index.where(valid, len(x))], valid


# sparse_mla_attention


def attention(
    new: Maker,
    tokens: int = 0,
    heads: int = 64,
    keys: int = 300,
    k: int = 100,
    d: int = 576,
    dtype: torch.dtype = BF16,
    sink: bool = True,
    deterministic: bool | None = None,
    invalid: float = 0.1,
    size: float = 1 / 3,
    leaves: Sequence[str] = ("q", "kv", "attn_sink"),
) -> Given:
    """Make arguments of `sparse_mla_attention`.

    size: standard deviation of q and kv. The sink has about as much weight as all keys together.
    """
    if not tokens:
        indices = new.ints([[[0, 3, -1, 3]], [[4, 1, 2, 0]], [[5, -1, -1, -7]]])
        given = {"q": new.bf16(3, 2, 576), "kv": new.bf16(5, 1, 576), "indices": indices, "softmax_scale": 0.04}
        return {**given, "d_v": D_V, "attn_sink": new.f32(2), "deterministic": None}
    given = {
        "q": floats(new, tokens, heads, d, dtype=dtype, size=size),
        "kv": floats(new, keys, 1, d, dtype=dtype, size=size),
        "indices": lists(new, tokens, keys, k, invalid),
        "softmax_scale": d**-0.5,
        "d_v": D_V,
        "attn_sink": new.f32(heads) + math.log(max(k, 1)) if sink else None,
        "deterministic": deterministic,
    }
    return ask(given, leaves)


def attended(a: Given, rounded: torch.dtype | None = None) -> list[torch.Tensor]:
    """Return out and lse by the formula. rounded: the dtype to which the softmax weights are rounded; None: no
    rounding."""
    rows, valid = rows_of(a["kv"][:, 0], a["indices"])
    q, wide = (x.float() if rounded else x for x in (a["q"], rows))
    logits = a["softmax_scale"] * torch.einsum("thd,tjd->thj", q, wide)
    most = logits.detach().masked_fill(~valid[:, None], -math.inf).amax(-1, keepdim=True).nan_to_num(neginf=0.0)
    weights = (logits - most).exp().masked_fill(~valid[:, None], 0.0)
    some = valid.any(-1)[:, None]
    total = weights.sum(-1).where(some, 1.0)
    whole = total if a["attn_sink"] is None else total + (a["attn_sink"] - most[..., 0]).exp()
    weights = weights / whole[..., None]
    weights = weights.to(rounded) if rounded else weights
    lse = (total.log() + most[..., 0]).masked_fill(~some, math.inf)
    return [torch.einsum("thj,tjd->thd", weights, rows[..., : a["d_v"]]), lse.T]


def check_attention(a: Given, found: Results, of: tuple[int, ...] = (0, 1), most: float = 7e-3) -> float:
    """Compare results and gradients with float64.

    The error of out or of a gradient is the norm of the difference, relative to the norm of the exact values. The limit
    is twice the error of the formula with rounded softmax weights (`attended`), but at most 1e-2. For attn_sink's
    gradient the limit is 1e-2. `delta_noise` is added to the limits of gradients.

    of    positions of the results through which gradients flow
    most  largest relative error that is allowed for results and for gradients whose terms do not cancel
    """
    exact, rough = with_leaves(a, F64), with_leaves(a)
    with torch.enable_grad():
        expected, rounded = attended(exact), attended(rough, a["q"].dtype)
    names = ("out", "lse", *leaves_of(exact))
    noises = delta_noise(a, found[0]) if 0 in of else {}
    expected += gradients_of([expected[i] for i in of], exact)
    rounded += gradients_of([rounded[i] for i in of], rough)
    assert_close("lse", found[1], expected[1].detach(), abs_tol=1e-5, rel_tol=8.01 / 65536)
    errors = []
    for name, got, right, other in zip(names, found, expected, rounded, strict=True):
        if name == "lse":
            continue
        if not got.isfinite().all():
            raise AssertionError(f"{name}: must be finite")
        rounding = 1e-2 if name == "attn_sink" else min(2 * distance(other, right), 1e-2)
        norm, noise = right.double().norm().item(), noises.get(name, 0.0)
        error, allowed = (got.double() - right).norm().item(), rounding * norm + noise + 1e-6
        if not error <= allowed:
            raise AssertionError(f"{name}: error {error:.3g} of at most {allowed:.3g}, norm {norm:.3g}")
        # The relative error of a gradient whose terms cancel is meaningless.
        errors += [error / norm] if norm > 100 * noise + 1e-3 else []
    if max(errors, default=0.0) > most:
        raise AssertionError(f"results and gradients: relative errors {errors}, at most {most}")
    return max(errors, default=0.0)


def delta_noise(a: Given, out: torch.Tensor) -> dict[str, float]:
    """Return {argument: absolute tolerance of the argument's gradient}.

    The kernels compute delta, the dot product of out and the gradient of out, from the rounded out. If the terms of a
    gradient cancel, mainly the error of delta remains, so a relative tolerance is not enough. The tolerances are a few
    times the effect of random errors of half a unit in the last place of out.
    """
    out, grad, q = (x.detach().double().norm(dim=-1) for x in (out, upstream(out), a["q"]))
    each, scale = out * grad * 2**-9 / 10, D_V**-0.5
    found = {"q": (each * out * scale).norm(), "kv": (each * q * scale).norm(), "attn_sink": each.norm()}
    return {name: noise.item() for name, noise in found.items()}


# sparse_indexer_loss


def loss(
    new: Maker,
    tokens: int = 0,
    keys: int = 300,
    k: int = 100,
    d: int = 576,
    heads: int = 128,
    index_heads: int = 64,
    di: int = 128,
    w_dtype: torch.dtype = F32,
    joint: float | None = None,
    deterministic: bool | None = False,
    invalid: float = 0.0,
    scale: float = 2.0,
    leaves: Sequence[str] = INDEXER,
) -> Given:
    """Make arguments of `sparse_indexer_loss`.

    Each query's keys are all different, unless `invalid` is set.

    scale  standard deviation of the attention's logits
    joint  pass an lse that is up to `joint` above that of the selected keys, as with more keys or a sink
    """
    if not tokens:
        indices = new.ints([[[0, 3, -1]], [[6, 6, 1]], [[7, -1, -1]], [[2, 0, 5]], [[4, 1, 3]]])
        given = {"q": new.bf16(5, 2, 512), "kv": new.bf16(7, 1, 512), **small_indexer(new), "indices": indices}
        return {**given, "softmax_scale": 0.04, "lse": new.f32(2, 5), "deterministic": False}
    given = {"q": new.bf16(tokens, heads, d), "kv": new.bf16(keys, 1, d)}
    given |= indexer(new, tokens, keys, index_heads, di)
    given["w_idx"] = given["w_idx"].to(w_dtype)
    if invalid:
        given["indices"] = lists(new, tokens, keys, k, invalid)
    else:
        chosen = new.order(tokens, keys, k).to(INT32)
        given["indices"] = torch.nn.functional.pad(chosen, (0, k - chosen.shape[1]), value=-1)[:, None]
    given |= {"softmax_scale": scale * d**-0.5, "lse": None, "deterministic": deterministic}
    if joint is not None:
        own = attended(with_leaves(given, F64) | {"d_v": 1, "attn_sink": None})[1].float()
        given["lse"] = own + joint * torch.rand(own.shape, generator=new.generator, device=new.device)
    return ask(given, leaves)


def small_indexer(new: Maker) -> Given:
    return {"q_idx": new.bf16(5, 8, 64), "k_idx": new.bf16(7, 64), "w_idx": new.f32(5, 8)}


def indexer(new: Maker, tokens: int, keys: int, heads: int, di: int) -> Given:
    """Make an indexer's q_idx, k_idx and w_idx. Weights have both signs. Scores have mean 0 and a standard deviation of
    about 0.7."""
    q, k = (floats(new, *shape, size=di**-0.25) for shape in ((tokens, heads, di), (keys, di)))
    return {"q_idx": q, "k_idx": k, "w_idx": new.f32(tokens, heads) * max(heads, 1) ** -0.5}


def divergence(p: torch.Tensor, scores: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    """Return KL(p || softmax(scores)) over each query's visible keys; 0 if a query sees none."""
    hidden = ~visible & visible.any(-1, keepdim=True)
    log_q = scores.masked_fill(hidden, -math.inf).log_softmax(-1).masked_fill(~visible, 0.0)
    return (torch.special.xlogy(p, p) - p * log_q).sum(-1)


def sparse_kl(a: Given) -> torch.Tensor:
    """Return kl by the formula. Products are in the arguments' dtype."""
    wide = torch.promote_types(a["q"].dtype, F32)
    with torch.no_grad():
        rows, valid = rows_of(a["kv"][:, 0], a["indices"])
        logits = a["softmax_scale"] * torch.einsum("thd,tjd->htj", a["q"], rows).to(wide)
        hidden = ~valid & valid.any(-1, keepdim=True)
        lse = logits.masked_fill(hidden, -math.inf).logsumexp(-1) if a["lse"] is None else a["lse"]
        p = (logits - lse[..., None]).exp().masked_fill(~valid, 0.0).sum(0)
        p = p / p.sum(-1, keepdim=True).clamp(min=torch.finfo(p.dtype).tiny)
    keys, _ = rows_of(a["k_idx"], a["indices"])
    products = torch.relu(torch.einsum("tid,tjd->tij", a["q_idx"], keys))
    return divergence(p, torch.einsum("tij,ti->tj", products, a["w_idx"].to(products.dtype)).to(wide), valid)


def check_loss(a: Given, found: Results, most: float = 0.012) -> float:
    """Compare with float64.

    most: limit of a gradient's error, relative to the norm of the exact gradient. With one key per query the exact
    gradient is 0, so the norm counts as at least 1e-4 per element (root mean square).
    """
    exact = with_leaves(a, F64)
    with torch.enable_grad():
        kl = sparse_kl(exact)
    # With one key per query the exact kl is 0, so the result is only rounding error, in a random direction. The limit 2
    # of the cosine distance then allows any direction.
    direction = 1e-3 if kl.abs().max() > 1e-4 else 2.0
    assert_close("kl", found[0], kl.detach(), abs_tol=2e-5, rel_tol=1e-3, cos_tol=direction)
    errors = [0.0]
    for name, got, right in zip(leaves_of(exact), found[1:], gradients_of([kl], exact), strict=True):
        errors.append(check_distance(name, got, right, most, 1e-4 * right.numel() ** 0.5))
    return max(errors)


# indexer_topk, indexer_warmup_attention: packed sequences

Lengths = Sequence[tuple[int, int]]
# (queries, keys) of each sequence. In this order: more queries than a tile has (128), no queries, some queries that see
# no key, few queries, and no keys.
LENGTHS = ((130, 140), (0, 4), (7, 3), (5, 70), (3, 0))


def packed(new: Maker, lengths: Lengths, first: int = 0) -> Given:
    """Make the bounds and largest lengths of packed sequences. first: index of the first query and of the first key."""
    queries, keys = (torch.tensor([first, *side]).cumsum(0).tolist() for side in zip(*lengths))
    longest = {name: max(side) for name, side in zip(("max_seqlen_q", "max_seqlen_k"), zip(*lengths))}
    return {"cu_seqlens_q": new.ints(queries), "cu_seqlens_k": new.ints(keys), **longest}


def sequences(a: Given) -> list[tuple[slice, slice, torch.Tensor]]:
    """Return (queries, keys, mask of the keys that each query sees) of each sequence."""
    found, device = [], a["q_idx"].device
    bounds = (a[name].tolist() for name in ("cu_seqlens_q", "cu_seqlens_k"))
    (begin_q, end_q), (begin_k, end_k) = ((x, x[1:]) for x in bounds)
    for queries, keys in zip(map(slice, begin_q, end_q), map(slice, begin_k, end_k)):
        m, n = queries.stop - queries.start, keys.stop - keys.start
        visible = torch.ones(m, n, dtype=torch.bool, device=device)
        found.append((queries, keys, visible.tril(n - m) if a["causal"] else visible))
    return found


def topk(
    new: Maker,
    lengths: Lengths = (),
    heads: int = 8,
    di: int = 64,
    top_k: int = 50,
    causal: bool = True,
) -> Given:
    """Make arguments of `indexer_topk`. With `lengths`, operands are small integers or eighths. So scores are exact and
    many are equal."""
    if not lengths:
        return {**small_indexer(new), "top_k": 3, **packed(new, ((3, 5), (2, 2))), "causal": True}
    queries, keys = (sum(side) for side in zip(*lengths))
    q, k = ((new.below(3, *shape) - 1).to(BF16) for shape in ((queries, heads, di), (keys, di)))
    w = (new.below(9, queries, heads) - 4) / 8
    return {"q_idx": q, "k_idx": k, "w_idx": w, "top_k": top_k, **packed(new, lengths), "causal": causal}


def check_topk(a: Given, found: Results) -> float:
    """Require exactly the keys with the highest scores, in ascending order; of equal scores the lowest keys win."""
    expected = torch.full((len(a["q_idx"]), a["top_k"]), -1, dtype=INT32, device=found[0].device)
    for queries, keys, visible in sequences(a):
        products = torch.relu(torch.einsum("thd,sd->ths", a["q_idx"][queries].double(), a["k_idx"][keys].double()))
        scores = torch.einsum("ths,th->ts", products, a["w_idx"][queries].double()).masked_fill(~visible, -math.inf)
        order = scores.sort(dim=1, descending=True, stable=True).indices[:, : a["top_k"]]
        last = scores.shape[1]
        best = order.masked_fill(~visible.gather(1, order), last).sort(1).values
        expected[queries, : best.shape[1]] = torch.where(best < last, best + keys.start, -1).to(INT32)
    wrong = (found[0][:, 0] != expected).any(1).nonzero().flatten().tolist()
    if found[0].shape != (*expected.shape[:1], 1, a["top_k"]) or wrong:
        raise AssertionError(f"queries {wrong[:9]}: other keys than the best")
    return 0.0


def warmup(
    new: Maker,
    lengths: Lengths = (),
    heads: int = 4,
    key_heads: int = 1,
    dims: tuple[int, int] = (128, 128),
    index: tuple[int, int] = (8, 64),
    causal: bool = True,
    leaves: Sequence[str] = INDEXER,
    around: tuple[int, int] = (0, 0),
) -> Given:
    """Make arguments of `indexer_warmup_attention`. With `lengths`, w_idx is 0 for every seventh query.

    dims    channels of keys and of values; with (576, 512) the values are the keys' first channels
    index   index heads and their channels
    around  numbers of rows before the first and after the last sequence; NaN in k, v and k_idx
    """
    if not lengths:
        given = {"q": new.bf16(5, 8, 64), "k": new.bf16(7, 2, 64), "v": new.bf16(7, 2, 64), **small_indexer(new)}
        return {**given, **packed(new, ((3, 5), (2, 2))), "softmax_scale": 0.125, "causal": True}
    (tokens, keys), (d, dv) = (sum(side) for side in zip(*lengths)), dims
    given = {"q": new.bf16(tokens, heads, d), "k": new.bf16(keys, key_heads, d), "v": None}
    given |= indexer(new, tokens, keys, *index)
    given["w_idx"][::7] = 0.0
    given["v"] = None if absorbed(dims) else new.bf16(keys, key_heads, dv)
    for name in [name for name, x in given.items() if x is not None]:
        pad = *(0, 0) * (given[name].dim() - 1), *around
        given[name] = torch.nn.functional.pad(given[name], pad, value=math.nan if name in OF_KEYS else 7.0)
    given |= {**packed(new, lengths, around[0]), "softmax_scale": d**-0.5, "causal": causal}
    ask(given, leaves)
    return given | {"v": given["k"][..., :dv]} if absorbed(dims) else given


def warmed_up(a: Given) -> list[torch.Tensor]:
    """Return out, lse and kl by the formula, in the arguments' dtype. Rows that belong to no sequence have out 0, lse
    inf and kl 0."""
    group, (tokens, heads, _) = a["q"].shape[1] // a["k"].shape[1], a["q"].shape
    results = [a["q"].new_zeros(tokens, heads, a["v"].shape[2]), a["q"].new_full((tokens, heads), math.inf)]
    results.append(a["q"].new_zeros(tokens))
    for queries, keys, visible in sequences(a):
        hidden = ~visible & visible.any(-1, keepdim=True)
        own_k, own_v = (a[name][keys].repeat_interleave(group, 1) for name in "kv")
        logits = a["softmax_scale"] * torch.einsum("thd,shd->hts", a["q"][queries], own_k)
        p = logits.masked_fill(hidden, -math.inf).softmax(-1).masked_fill(~visible, 0.0)
        lse = logits.detach().masked_fill(hidden, -math.inf).logsumexp(-1).masked_fill(~visible.any(-1), math.inf)
        products = torch.relu(torch.einsum("thd,sd->hts", a["q_idx"][queries], a["k_idx"][keys]))
        scores = (products * a["w_idx"][queries].to(products.dtype).T[..., None]).sum(0)
        out = torch.einsum("hts,shd->thd", p, own_v)
        kl = divergence(p.detach().mean(0), scores, visible)
        for result, part in zip(results, (out, lse.T, kl)):
            result[queries] = part
    return [results[0], results[1].T, results[2]]


def check_warmup(a: Given, found: Results) -> float:
    """Compare with float64. The relative error of the loss and of the indexer's gradients is limited to twice the error
    of the formula with every step in bf16, but to at most 1e-2. The limit for attention's gradients is 2e-2."""
    exact, rough = with_leaves(a, F64), with_leaves(a)
    with torch.enable_grad():
        expected, rounded = warmed_up(exact), warmed_up(rough)
    expected += gradients_of([expected[0], expected[2]], exact)
    rounded += gradients_of([rounded[0], rounded[2]], rough)
    names = ("out", "lse", "kl", *leaves_of(exact))
    check_distance("out", found[0], expected[0], 4e-3)
    assert_close("lse", found[1], expected[1], abs_tol=2e-5, rel_tol=1e-5)
    assert_close("kl", found[2], expected[2].detach(), abs_tol=2e-5, rel_tol=1e-4, cos_tol=1e-4)
    errors = []
    for name, got, right, other in [*zip(names, found, expected, rounded, strict=True)][2:]:
        most = 2e-2 if name in "qkv" else min(1e-2, max(2 * distance(other, right), 1e-6))
        errors.append(check_distance(name, got, right, most))
    return max(errors)


# Hostile contents (see case.Hostile), and the results that they cannot change.

SPARSE = {"tokens": 5, "keys": 150, "k": 70}
WARMUPS = {
    "64": {"dims": (64, 64), "heads": 2},
    "192": {"dims": (192, 128), "heads": 2, "index": (16, 64)},
    "absorbed": {"dims": (576, 512), "heads": 2, "causal": False},
}
KINDS = {
    "576": {"heads": 64},
    "512 few heads": {"d": 512, "heads": 8, "sink": False},
    "576 deterministic": {"heads": 8, "deterministic": True},
}
LOSSES = {
    "576": {"heads": 2, "index_heads": 8, "di": 64},
    "512 joint": {"d": 512, "heads": 66, "joint": 5.0},
    "deterministic": {"heads": 2, "index_heads": 8, "deterministic": True},
}
# {result or gradient with a row per query: the dimension of queries}, and {gradient with a row per key: the dimension
# of keys}.
OF_QUERIES = {"out": 0, "lse": 1, "kl": 0, "q": 0, "q_idx": 0, "w_idx": 0, "indices": 0}
OF_KEYS = {"kv": 0, "k": 0, "v": 0, "k_idx": 0}


def kept_rows(names: Sequence[str], queries: Sequence[int], keys: Sequence[int]) -> Kept:
    """Return a function that keeps the rows of these queries and keys in the named results and gradients. It does not
    keep sums over queries, such as the gradient of attn_sink."""

    def kept(results: Results) -> Results:
        found = []
        for name, x in zip(names, results, strict=True):
            for dims, rows in ((OF_QUERIES, queries), (OF_KEYS, keys)):
                if name in dims:
                    found.append(x.index_select(dims[name], torch.tensor(rows, dtype=torch.long, device=x.device)))
        return found

    return kept


def other_queries(results: Sequence[str], given: Given, place: tuple[int, ...]) -> Kept:
    """Return a function that keeps the results and gradients of all queries except place[0]. It also keeps the
    gradients of all keys outside this query's list."""
    named = {*given["indices"][place[0], 0].tolist()}
    queries = [t for t in range(len(given["q"])) if t != place[0]]
    keys = [j for j in range(len(given["kv"])) if j not in named]
    return kept_rows((*results, *leaves_of(given)), queries, keys)


def other_sequences(results: Sequence[str], given: Given, place: int) -> Kept:
    """Return a function that keeps the results and gradients of all sequences except the two that share the wrong
    boundary."""
    apart = [x for i, x in enumerate(sequences(given)) if i not in (place - 1, place)]
    queries, keys = ([i for x in apart for i in range(x[side].start, x[side].stop)] for side in (0, 1))
    return kept_rows((*results, *leaves_of(given)), queries, keys)


def entries(indices: torch.Tensor) -> list[tuple[int, int, int]]:
    last, k = len(indices) - 3, indices.shape[2]
    return [(0, 0, 0), (0, 0, k - 1), (last, 0, k - 1), (last, 0, 3)]


def of_lists(results: Sequence[str], kinds: dict[str, Given]) -> dict[str, Hostile]:
    kept = partial(other_queries, results)
    return {f"indices {kind}": Hostile(kept, entries, SPARSE | sizes, exact=False) for kind, sizes in kinds.items()}


def of_bounds(results: Sequence[str], kinds: dict[str, Given]) -> dict[str, Hostile]:
    kept: Callable[[Given, int], Kept] = partial(other_sequences, results)
    every, both = lambda bounds: range(len(bounds)), ("cu_seqlens_q", "cu_seqlens_k")
    sized = {f"{name} {kind}".strip(): sizes for name in both for kind, sizes in kinds.items()}
    return {name: Hostile(kept, every, {"lengths": LENGTHS, **sizes}, exact=False) for name, sizes in sized.items()}


_EVERY = ("q", "k", "v", *INDEXER)
CASES = [
    Trained(
        "sparse_mla_attention",
        attention,
        check_attention,
        {"tokens": 7, "heads": 72, "keys": 200, "k": 130, "size": 1.0, "deterministic": True},
        hostile=of_lists(("out", "lse"), {kind: {"invalid": 0.2, **sizes} for kind, sizes in KINDS.items()}),
        of=(0, 1),
    ),
    Trained(
        "sparse_indexer_loss",
        loss,
        check_loss,
        {"tokens": 7, "heads": 20, "index_heads": 8, "k": 130, "invalid": 0.1, "deterministic": True},
        hostile=of_lists(("kl",), {kind: {"invalid": 0.2, **sizes} for kind, sizes in LOSSES.items()}),
    ),
    Case(
        "indexer_topk",
        topk,
        check_topk,
        {"lengths": LENGTHS},
        hostile=of_bounds(("indices",), {"": {"top_k": 16}}),
    ),
    Trained(
        "indexer_warmup_attention",
        warmup,
        check_warmup,
        {"lengths": LENGTHS, "key_heads": 2, "dims": (64, 64)},
        hostile=of_bounds(("out", "lse", "kl"), {kind: {"leaves": _EVERY, **sizes} for kind, sizes in WARMUPS.items()}),
        of=(0, 2),
    ),
]
