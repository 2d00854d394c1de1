"""Cases of the MoE ops: gates, routers, the sort of entries (token, expert) by expert, and the sum of experts'
outputs."""

import math

import torch

import dsa
from dsa.cases.case import BF16, F32, INT32, PER_ROW, Case, Given, Hostile, Kept, Maker, Results, ends
from dsa.testing import assert_close

INT64 = torch.int64


def exact_operands(new: Maker, tokens: int, channels: int, experts: int, dtype: torch.dtype) -> Given:
    """Return x and weight for which x @ weight.T is exact in fp32, in any order of sums. The results have mean 0 and a
    standard deviation of about 1."""
    x, weight = new.below(5, tokens, channels) - 2, new.below(3, experts, channels) - 1
    return {"x": x.to(dtype), "weight": (weight * 2.0 ** -round(math.log2(channels) / 2)).to(dtype)}


def equal(names: str, found: Results, expected: Results) -> None:
    for name, got, right in zip(names.split(), found, expected, strict=True):
        if not torch.equal(got, right.to(got.dtype)):
            raise AssertionError(f"{name}: expected {right.flatten()[:9].tolist()}, got {got.flatten()[:9].tolist()}")


# moe_gate


def gate(new: Maker, tokens: int = 3, experts: int = 16, top_k: int = 3, **options: object) -> Given:
    groups = {"scores": "sigmoid", "n_group": 4, "topk_group": 2, "normalise": True, "scale": 2.5} | options
    return {"logits": new.f32(tokens, experts), "bias": new.f32(experts), "top_k": top_k, **groups}


def gated(a: Given) -> tuple[torch.Tensor, torch.Tensor]:
    logits = a["logits"].double()
    s = logits.sigmoid() if a["scores"] == "sigmoid" else torch.nn.functional.softplus(logits).sqrt()
    choice = (s + a["bias"].double()).unflatten(1, (a["n_group"], -1))
    of_group = choice.topk(min(2, choice.shape[2]), 2).values.sum(2)
    dropped = of_group.argsort(dim=1, descending=True, stable=True)[:, a["topk_group"] :]
    choice = choice.scatter(1, dropped[..., None].expand(-1, -1, choice.shape[2]), -math.inf).flatten(1)
    experts = choice.argsort(dim=1, descending=True, stable=True)[:, : a["top_k"]]
    weights = s.gather(1, experts)
    return experts, a["scale"] * (weights / (weights.sum(1, keepdim=True) + 1e-20) if a["normalise"] else weights)


def check_gate(a: Given, found: Results, ties: bool = False) -> float:
    """Check the tokens whose choice of experts is sure: noise of up to 1e-5 in the bias does not change it.

    ties: many scores are equal, so do not require that most tokens have a sure choice.
    """
    (experts, weights), (expected, right) = found, gated(a)
    shaken, _ = gated(a | {"bias": a["bias"] + 1e-5 * torch.rand_like(a["bias"])})
    sure = (shaken == expected).all(1)
    if not ties and len(sure) >= 50 and sure.float().mean() < 0.95:
        raise AssertionError("experts: hardly any choice is sure")
    equal("experts", [experts[sure]], [expected[sure]])
    if not ((experts >= 0) & (experts < a["logits"].shape[1])).all() or (experts.sort(1).values.diff(dim=1) == 0).any():
        raise AssertionError("experts: out of range, or one of them twice")
    return assert_close("weights", weights[sure], right[sure], abs_tol=1e-30, rel_tol=2e-5)


# sort_by_expert


def entries(new: Maker, tokens: int = 0, count: int = 4, dtype: torch.dtype = INT32) -> Given:
    if not tokens:
        return {"experts": new.ints([[2, 0], [7, 2], [0, -1]], dtype), "count": count}
    return {"experts": new.below(count + 3, tokens, 8, dtype=dtype) - 1, "count": count}


def sorted_entries(experts: torch.Tensor, count: int) -> Results:
    flat = experts.flatten().where((experts.flatten() >= 0) & (experts.flatten() < count), count)
    order = flat.sort(stable=True).indices
    rows = torch.empty_like(order).scatter_(0, order, torch.arange(len(flat), device=flat.device))
    last = (flat[:, None] <= torch.arange(count, device=flat.device)).sum(0)
    return order, rows.masked_fill(flat == count, -1).view(experts.shape), last


def check_order(a: Given, found: Results) -> float:
    equal("order rows ends", found, sorted_entries(a["experts"], a["count"]))
    return 0.0


def other_experts(given: Given, place: tuple[int, ...]) -> Kept:
    """Return a function that keeps the number and the order of the entries of all experts except the expert at `place`
    in the valid call. It also keeps the sorted `order`, which contains each entry once."""
    experts, count = given["experts"].flatten().long(), given["count"]
    i = place[0] * given["experts"].shape[1] + place[1]
    named = (experts >= 0) & (experts < count) & (experts != experts[i])
    others = [e for e in range(count) if e != int(experts[i])]

    def kept(results: Results) -> Results:
        order, rows, last = (x.flatten().long() for x in results)
        begins = torch.nn.functional.pad(last, (1, 0))[:-1]
        placed = (rows - begins[experts.clamp(0, count - 1)])[named]
        return [(last - begins)[others], placed, order[rows[named]], order.sort().values]

    return kept


# combine_experts


def experts_outputs(
    new: Maker,
    tokens: int = 0,
    k: int = 8,
    channels: int = 1536,
    dtype: torch.dtype = BF16,
    index_dtype: torch.dtype = INT32,
    shared: bool = True,
    residual: bool = True,
    weighted: bool = True,
) -> Given:
    """Make arguments of `combine_experts`. With `tokens`, each row of y belongs to one token, and some row indices are
    outside y."""
    if tokens:
        y = new.f32(max(tokens * k, 1), channels).to(dtype)
        drawn = torch.rand(tokens * k, generator=new.generator, device=new.device)
        rows = drawn.argsort().view(tokens, k).to(index_dtype)
        rows[::5, :1], rows[1::5, -1:] = -1, len(y)
    else:
        rows = new.ints([[0, 3], [5, -1], [2, 2]], index_dtype)
        tokens, channels = 3, 16
        added = {"shared": new.bf16(3, 16), "residual": new.bf16(3, 16)}
        return {"y": new.bf16(6, 16), "rows": rows, "weights": new.f32(3, 2), **added}
    given = {"y": y, "rows": rows, "weights": new.f32(tokens, k) if weighted else None}
    for name, wanted in (("shared", shared), ("residual", residual)):
        given[name] = new.f32(tokens, channels).to(dtype) if wanted else None
    return given


def summed(a: Given) -> torch.Tensor:
    """Return the sum in float64. `combine_experts` sums in fp32 and rounds once, or twice with a residual."""
    y, rows, shared, residual = (a[name] for name in ("y", "rows", "shared", "residual"))
    there = (rows >= 0) & (rows < len(y))
    found = torch.nn.functional.pad(y, (0, 0, 0, 1))[rows.where(there, len(y)).long()].double()
    factors = 1.0 if a["weights"] is None else a["weights"].double().masked_fill(~there, 0.0)[..., None]
    out = (found * factors).sum(1)
    return out + sum((x.double() for x in (shared, residual) if x is not None), torch.zeros_like(out))


def check_sum(a: Given, found: Results) -> float:
    """Require the reference's bits, and compare with float64."""
    expected = dsa.reference.combine_experts(**a)
    equal("out", [found[0].nan_to_num(7e4)], [expected.nan_to_num(7e4)])
    if not expected.isfinite().all():
        return 0.0
    size = summed({name: x.abs() if name != "rows" and x is not None else x for name, x in a.items()})
    error = (found[0].double() - summed(a)).abs()
    roundings = torch.finfo(a["y"].dtype).eps + (a["rows"].shape[1] + 1) * torch.finfo(F32).eps
    if not (error <= 2 * roundings * size).all():
        raise AssertionError(f"out: off by up to {(error / size).nan_to_num(0.0).max():.3g} of the parts' size")
    return error.max().item() if error.numel() else 0.0


# route_to_experts, route_by_table


def router(
    new: Maker,
    tokens: int = 0,
    channels: int = 4096,
    experts: int = 256,
    top_k: int = 8,
    dtype: torch.dtype = BF16,
    first_expert: int = 0,
    count: int | None = None,
    **options: object,
) -> Given:
    """Make arguments of `route_to_experts`. With `tokens`, the operands are exact (`exact_operands`)."""
    groups = {"scores": "sigmoid", "n_group": 4, "topk_group": 2, "normalise": True, "scale": 2.5}
    if not tokens:
        random = {"x": new.bf16(3, 64), "weight": new.bf16(16, 64), "bias": new.f32(16), "top_k": 3}
        return {**random, **groups, "first_expert": 4, "count": 8}
    operands = exact_operands(new, tokens, channels, experts, dtype)
    own = {"first_expert": first_expert, "count": experts - first_expert if count is None else count}
    return {**operands, "bias": (new.below(7, experts) - 3) / 8, "top_k": top_k, **groups, **options, **own}


def check_router(a: Given, found: Results) -> float:
    """Require the bits of `moe_gate` on the exact logits, and the results of `sort_by_expert` for the chosen
    experts."""
    logits = (a["x"].double() @ a["weight"].double().T).float()
    options = {name: a[name] for name in ("top_k", "scores", "n_group", "topk_group", "normalise", "scale")}
    gate = {"logits": logits, "bias": a["bias"], **options}
    equal("experts weights", found[:2], dsa.moe_gate(**gate))
    equal("order rows ends", found[2:], sorted_entries(found[0] - a["first_expert"], a["count"]))
    return check_gate(gate, found[:2], ties=True)


def table_router(
    new: Maker,
    tokens: int = 0,
    channels: int = 4096,
    experts: int = 256,
    top_k: int = 6,
    dtype: torch.dtype = BF16,
    first_expert: int = 0,
    count: int | None = None,
) -> Given:
    """Make arguments of `route_by_table`. With `tokens`, the operands are exact (`exact_operands`), and every seventh
    id is outside the table."""
    if not tokens:
        random = {"x": new.bf16(3, 64), "weight": new.bf16(16, 64)}
        table, ids = new.ints([[0, 5, 2], [15, 1, 8]]).long(), new.ints([1, 0, 1]).long()
        return {**random, "table": table, "tokens": ids, "scale": 2.5, "first_expert": 4, "count": 8}
    operands = exact_operands(new, tokens, channels, experts, dtype)
    ids = new.below(1000, tokens, dtype=INT64)
    ids[3::7] = 1000
    own = {"first_expert": first_expert, "count": experts - first_expert if count is None else count}
    return {**operands, "table": new.order(1000, experts, top_k), "tokens": ids, "scale": 1.5, **own}


def check_table_router(a: Given, found: Results) -> float:
    ids, table, count = a["tokens"], a["table"], len(a["weight"])
    there = (ids >= 0) & (ids < len(table))
    named = table[ids.where(there, 0)].masked_fill(~there[:, None], -1)
    named = named.masked_fill((named < 0) | (named >= count), -1)
    s = (a["x"].double() @ a["weight"].double().T).gather(1, named.clamp(min=0)).exp().log1p().sqrt() * (named >= 0)
    equal("experts", found[:1], [named])
    own = (named - a["first_expert"]).masked_fill(named < 0, -1)
    equal("order rows ends", found[2:], sorted_entries(own, a["count"]))
    expected = a["scale"] * s / (s.sum(1, keepdim=True) + 1e-20)
    return assert_close("weights", found[1], expected, abs_tol=1e-30, rel_tol=1e-5)


def other_tokens(given: Given, place: tuple[int, ...]) -> Kept:
    """Return a function that keeps the experts and weights of all tokens except token place[0]. The arguments are those
    of `own_rows`, so token t reads only row t of the table."""
    others = [t for t in range(len(given["x"])) if t != place[0]]
    return lambda results: [results[0][others], results[1][others]]


def own_rows(new: Maker) -> Given:
    """Make arguments of `route_by_table`. Row t of the table is read by token t alone."""
    given = table_router(new, 12, 64, 16, 3, first_expert=4, count=8)
    return given | {"table": given["table"][:12], "tokens": torch.arange(12, device=new.device)}


def of_both(name: str, hostile: Hostile, argument: str) -> dict[str, Hostile]:
    """Return hostile contents of the argument `name`, as int32 and as int64. argument: the size of `Case.make` that
    sets this dtype."""
    sizes = hostile.sizes
    kinds = {"int32": INT32, "int64": INT64}
    return {f"{name} {kind}": Hostile(hostile.kept, ends, {**sizes, argument: x}) for kind, x in kinds.items()}


_ROUTED = Hostile(other_tokens, ends, {"rows": True})
CASES = [
    Case("moe_gate", gate, check_gate, {"tokens": 300, "experts": 256, "top_k": 8, "n_group": 8, "topk_group": 4}),
    Case(
        "sort_by_expert",
        entries,
        check_order,
        {"tokens": 777, "count": 256},
        hostile=of_both("experts", Hostile(other_experts, ends, {"tokens": 5}), "dtype"),
    ),
    Case(
        "combine_experts",
        experts_outputs,
        check_sum,
        {"tokens": 37},
        hostile=of_both("rows", Hostile(PER_ROW.kept, ends, {"tokens": 6, "k": 9, "channels": 512}), "index_dtype"),
    ),
    Case("route_to_experts", router, check_router, {"tokens": 33, "n_group": 8, "topk_group": 4}),
    Case(
        "route_by_table",
        lambda new, rows=False, **sizes: own_rows(new) if rows else table_router(new, **sizes),
        check_table_router,
        {"tokens": 33},
        hostile={"table": _ROUTED, "tokens": _ROUTED},
    ),
]
