"""Gate, order of experts, and the sum of what they give."""

import torch

import dsa
from dsa.testing import assert_close


def expert_routing(device: str) -> None:
    # Two of four groups of four stay: by their two best, 1.5 and 1.15, not by the one that has 0.9 alone.
    chosen_by = torch.tensor([[0.9, 0.1, 0, 0, 0.8, 0.7, 0, 0, 0.5, 0.4, 0, 0, 0.6, 0.55, 0.05, 0]], device=device)
    logits = torch.randn(1, 16, device=device)
    s = torch.sigmoid(logits)
    options = {"n_group": 4, "topk_group": 2, "scale": 2.5}
    experts, weights = dsa.moe_gate(logits, (chosen_by - s)[0], 3, **options)
    if experts.tolist() != [[4, 5, 12]]:
        raise AssertionError(f"experts: expected 4, 5, 12, got {experts.tolist()}")
    chosen = s.gather(1, experts)
    assert_close("weights", weights, 2.5 * chosen / chosen.sum(), abs_tol=0.0, rel_tol=1e-5)
    logits = torch.tensor([[-9.0, 3.0, 1.0, 25.0]], device=device)
    experts, weights = dsa.moe_gate(logits, torch.zeros(4, device=device), 4, scores="sqrtsoftplus", normalise=False)
    if experts.tolist() != [[3, 1, 2, 0]]:
        raise AssertionError(f"experts: expected 3, 1, 2, 0, got {experts.tolist()}")
    expected = torch.log1p(logits.double().exp()).sqrt().gather(1, experts)
    assert_close("weights", weights, expected, abs_tol=0.0, rel_tol=1e-5)
    found = dsa.sort_by_expert(torch.tensor([[2, 0], [7, 2], [0, -1]], device=device), 4)
    expected_parts = ([1, 4, 0, 3, 2, 5], [[2, 0], [-1, 3], [1, -1]], [2, 2, 4, 4])
    for name, x, expected_part in zip(("order", "rows", "ends"), found, expected_parts):
        if x.tolist() != expected_part:
            raise AssertionError(f"{name}: expected {expected_part}, got {x.tolist()}")


def route_to_experts(device: str) -> None:
    """Logits are integers, which every order of summation gives; experts 2 to 5 of six are this process's."""
    x = torch.zeros(3, 64, device=device, dtype=torch.bfloat16)
    weight = torch.zeros(6, 64, device=device, dtype=torch.bfloat16)
    x[0, 0] = x[1, 33] = x[2, 63] = 1
    weight[:, 0] = torch.tensor([4, 0, 0, 3, 0, -1], device=device)
    weight[:, 33] = torch.tensor([0, 1, 0, 0, 5, 0], device=device)
    weight[:, 63] = torch.tensor([-2, -2, 0, 1, -2, -2], device=device)
    options = {"normalise": False, "scale": 2.0, "first_expert": 2, "count": 4}
    found = dsa.route_to_experts(x, weight, torch.zeros(6, device=device), 2, **options)
    expected = ([[0, 3], [4, 1], [3, 2]], [5, 1, 4, 2, 0, 3], [[-1, 1], [3, -1], [2, 0]], [1, 3, 4, 4])
    for name, got, right in zip(("experts", "order", "rows", "ends"), (found[0], *found[2:]), expected):
        if got.tolist() != right:
            raise AssertionError(f"{name}: expected {right}, got {got.tolist()}")
    logits = torch.tensor([[4, 3], [5, 1], [1, 0]], device=device)
    assert_close("weights", found[1], 2 * logits.double().sigmoid(), abs_tol=0.0, rel_tol=1e-5)
    # More tokens than one CTA sorts. Products and sums are exact.
    x = torch.randint(-2, 3, (40, 256), device=device).bfloat16()
    weight = (torch.randint(-1, 2, (48, 256), device=device) / 16).bfloat16()
    bias = torch.randn(48, device=device)
    experts, weights, *by_expert = dsa.route_to_experts(x, weight, bias, 4, first_expert=8, count=24)
    gate = dsa.moe_gate((x.double() @ weight.double().T).float(), bias, 4)
    for name, got, right in zip(("experts", "weights"), (experts, weights), gate):
        assert_close(name, got, right, abs_tol=0.0, rel_tol=1e-5)
    for name, got, right in zip(("order", "rows", "ends"), by_expert, dsa.sort_by_expert(experts - 8, 24)):
        if not torch.equal(got, right):
            raise AssertionError(f"{name}: not what sort_by_expert gives")


def route_by_table(device: str) -> None:
    """Of few tokens and of more than one CTA sorts; experts 8 to 31 of 48 are this process's, and one token is in no
    row. Products and sums are exact."""
    for count in (3, 40):
        x = torch.randint(-2, 3, (count, 256), device=device).bfloat16()
        weight = (torch.randint(-1, 2, (48, 256), device=device) / 16).bfloat16()
        table = torch.rand(20, 48, device=device).argsort(1)[:, :4].contiguous()
        tokens = torch.randint(20, (count,), device=device)
        named = table[tokens]
        tokens[1], named[1] = 20, -1
        experts, weights, *by_expert = dsa.route_by_table(x, weight, table, tokens, scale=1.5, first_expert=8, count=24)
        logits = (x.double() @ weight.double().T).gather(1, named.clamp(min=0))
        s = torch.log1p(logits.exp()).sqrt() * (named >= 0)
        assert_close("weights", weights, 1.5 * s / (s.sum(1, keepdim=True) + 1e-20), abs_tol=0.0, rel_tol=1e-5)
        order = dsa.sort_by_expert(torch.where(named < 0, -1, named - 8), 24)
        for name, got, right in zip(("experts", "order", "rows", "ends"), (experts, *by_expert), (named, *order)):
            if not torch.equal(got, right):
                raise AssertionError(f"{name}: not what the table and sort_by_expert give")


def combine_experts(device: str) -> None:
    """Three rows a token, one of them outside, and the shared expert's."""
    y, shared = torch.randn(50, 72, device=device), torch.randn(20, 72, device=device)
    rows, weights = torch.randint(50, (20, 3), device=device, dtype=torch.int32), torch.rand(20, 3, device=device)
    expected = (y.double()[rows.long()] * weights.double()[..., None])[:, :2].sum(1)
    rows[:, 2] = torch.tensor([-1, 50], device=device).repeat(10)
    assert_close("out", dsa.combine_experts(y, rows, weights), expected, abs_tol=1e-5, rel_tol=1e-5)
    got = dsa.combine_experts(y, rows, weights, shared)
    assert_close("out with shared", got, expected + shared.double(), abs_tol=1e-5, rel_tol=1e-5)
    got = dsa.combine_experts(y, rows, weights, shared, 3 * shared)
    assert_close("out on a residual", got, expected + 4 * shared.double(), abs_tol=1e-5, rel_tol=1e-5)
