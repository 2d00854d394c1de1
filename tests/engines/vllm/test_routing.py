"""Gate, router and sort of a mixture as one op, between vLLM's own calls of them."""

from types import SimpleNamespace

import pytest
import torch

import dsa
from dsa_engines.vllm import routing

EXPERTS, CHANNELS, TOP_K = 16, 64, 3


class GroupedTopKRouter(SimpleNamespace):
    num_expert_group, topk_group, skip_padding = 4, 2, False


class FusedTopKBiasRouter(SimpleNamespace):
    bias_vl = _hash_indices_table = None


class OtherRouter(SimpleNamespace):
    pass


pytestmark = pytest.mark.usefixtures("nothing_is_compiled")


def make_router(kind=GroupedTopKRouter, **changes):
    bias = torch.linspace(0, 1, EXPERTS)
    fields = {"top_k": TOP_K, "renormalize": True, "scoring_func": "sigmoid", "routed_scaling_factor": 2.5}
    return kind(**(fields | {"e_score_correction_bias": bias, "num_fused_shared_experts": 0} | changes))


def make_gate(**changes):
    torch.manual_seed(1)
    weight = torch.randn(EXPERTS, CHANNELS, dtype=torch.bfloat16)
    fields = {"weight": weight, "is_unquantized": True, "bias": None, "_return": lambda logits: (logits, None)}
    return SimpleNamespace(**(fields | changes))


class Runner:
    """What vLLM's runner does: gate, router, experts."""

    def __init__(self, router, gate, expert_map=None, dsa_serves=True, pcp_size=1, naive=False):
        self.router, self.gate = router, gate
        self.moe_config, self.do_naive_dispatch_combine = SimpleNamespace(pcp_size=pcp_size), naive
        self.routed_experts = SimpleNamespace(expert_map=expert_map, dsa_serves=dsa_serves)

    def run(self, x):
        logits, _ = routing.gate_forward(lambda gate, x: ("the gate's own", None))(self.gate, x)
        compute = routing.compute_routing(lambda router, *given, input_ids: ("the router's own", given[1]))
        weights, experts = compute(self.router, x, logits, None)
        return weights, experts, None if isinstance(weights, str) else routing.by_expert(experts)


def run(router, gate, x, **of_layer):
    return routing.forward_impl(lambda runner, x, *given: runner.run(x))(Runner(router, gate, **of_layer), x, x, None)


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize(
    ("router", "options"),
    [
        (make_router(), {"n_group": 4, "topk_group": 2}),
        (make_router(FusedTopKBiasRouter), {}),
        (make_router(FusedTopKBiasRouter, scoring_func="sqrtsoftplus"), {"scores": "sqrtsoftplus"}),
    ],
)
def test_gate_router_and_sort(router, options, tokens):
    gate, x = make_gate(), torch.randn(tokens, CHANNELS, dtype=torch.bfloat16)
    weights, experts, by_expert = run(router, gate, x)
    expected = dsa.route_to_experts(x, gate.weight, router.e_score_correction_bias, TOP_K, scale=2.5, **options)
    for found, one in zip((experts, weights, *by_expert), expected, strict=True):
        assert torch.equal(found, one)
    assert routing.by_expert(experts) is None  # another mixture's


NOT_SERVED = [
    ({"tokens": 65}, {}, {}),
    ({}, {"weight": torch.zeros(EXPERTS, CHANNELS)}, {}),
    ({}, {"bias": torch.zeros(EXPERTS)}, {}),
    ({}, {"is_unquantized": False}, {}),
    ({}, {}, {"scoring_func": "softmax"}),
    ({}, {}, {"num_fused_shared_experts": 1}),
    ({}, {}, {"skip_padding": True}),
    ({}, {}, {"e_score_correction_bias": None}),
    ({}, {}, {"_hash_indices_table": torch.zeros(9, TOP_K)}),
    ({}, {}, {"bias_vl": torch.zeros(EXPERTS)}),
    ({"kind": OtherRouter}, {}, {}),
    ({"expert_map": torch.zeros(EXPERTS)}, {}, {}),
    ({"dsa_serves": False}, {}, {}),
    ({"pcp_size": 2}, {}, {}),
    ({"naive": True}, {}, {}),
]


@pytest.mark.parametrize(("changes", "of_gate", "of_router"), NOT_SERVED)
def test_other_mixtures_stay_vllms(changes, of_gate, of_router):
    router = make_router(changes.get("kind", FusedTopKBiasRouter), **of_router)
    x = torch.randn(changes.get("tokens", 2), CHANNELS, dtype=torch.bfloat16)
    of_layer = {name: value for name, value in changes.items() if name not in ("kind", "tokens")}
    found = run(router, make_gate(**of_gate), x, **of_layer)
    assert found == ("the router's own", "the gate's own", None)


def test_a_gate_outside_of_a_mixture_is_vllms():
    gate, x = make_gate(), torch.randn(2, CHANNELS, dtype=torch.bfloat16)
    assert routing.gate_forward(lambda gate, x: "the gate's own")(gate, x) == "the gate's own"


def test_nothing_is_left_when_the_experts_fail():
    class Fails(Runner):
        def run(self, x):
            super().run(x)
            raise RuntimeError

    gate, x = make_gate(), torch.randn(2, CHANNELS, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError):
        routing.forward_impl(lambda runner, x, *given: runner.run(x))(Fails(make_router(), gate), x, x, None)
    assert routing.gate_forward(lambda gate, x: "the gate's own")(gate, x) == "the gate's own"


def test_a_router_whose_kernels_do_not_compile_is_vllms(monkeypatch):
    def fails(*given):
        raise RuntimeError

    monkeypatch.setattr(routing, "route", fails)
    x = torch.randn(2, CHANNELS, dtype=torch.bfloat16)
    assert run(make_router(), make_gate(), x) == ("the router's own", "the gate's own", None)
