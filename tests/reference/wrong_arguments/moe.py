"""Wrong arguments of gates, routers and sorts."""

from tests.reference.common import BF16, zeros

IN_GROUPS = "in the topk_group=2 of n_group=4 groups that stay, got"
OPERANDS = [
    ({"x": [1.0]}, "x: must be a torch.Tensor, got list"),
    ({"x": zeros(3, 64)}, "x: dtype must be bfloat16 or float16, got float32"),
    ({"weight": zeros(16, 64)}, "weight: dtype must be bfloat16 or float16, got float32"),
    ({"weight": zeros(16, 64).half()}, "weight: dtype must be x's bfloat16, got float16"),
    ({"weight": zeros(16, 32, dtype=BF16)}, "weight: shape must be [E, 64], got [16, 32]"),
    ({"weight": zeros(dtype=BF16)}, "weight: shape must be [E, 64], got []"),
    ({"first_expert": -1}, "first_expert: must be at least 0, got -1"),
    ({"first_expert": "4"}, "first_expert: must be an integer, got '4'"),
    ({"first_expert": 16, "count": None}, "count: must be at least 1, got 0"),
    ({"first_expert": 12, "count": 5}, "count: must be at most 4, the experts of weight from first_exp"),
]
WRONG = {
    "moe_gate": [
        ({"logits": zeros(3, 16, dtype=BF16)}, "logits: dtype must be float32, got bfloat16"),
        ({"bias": zeros(7)}, "bias: shape must be [16], got [7]"),
        ({"scores": "softmax"}, "scores: must be 'sigmoid' or 'sqrtsoftplus', got 'softmax'"),
        ({"n_group": 3}, "n_group: must divide the 16 experts of logits, got 3"),
        ({"topk_group": 5}, "topk_group: must be from 1 to n_group=4, got 5"),
        ({"top_k": 9}, f"top_k: must be from 1 to the 8 experts of logits {IN_GROUPS} 9"),
        ({"top_k": 0}, "top_k: must be at least 1, got 0"),
    ],
    "sort_by_expert": [
        ({"experts": zeros(3)}, "experts: dtype must be int32 or int64, got float32"),
        ({"count": 0}, "count: must be at least 1, got 0"),
    ],
    "route_by_table": [
        *OPERANDS,
        ({"table": zeros(2, 3).int()}, "table: dtype must be int64, got int32"),
        ({"tokens": zeros(4).long()}, "tokens: shape must be [3], got [4]"),
        ({"scale": "1"}, "scale: must be a number, got '1'"),
    ],
    "route_to_experts": [
        *OPERANDS,
        ({"bias": zeros(11)}, "bias: shape must be [16], got [11]"),
        ({"top_k": 9}, f"top_k: must be from 1 to the 8 experts of weight {IN_GROUPS} 9"),
        ({"n_group": 5}, "n_group: must divide the 16 experts of weight, got 5"),
        ({"topk_group": 5}, "topk_group: must be from 1 to n_group=4, got 5"),
        ({"scores": "softmax"}, "scores: must be 'sigmoid' or 'sqrtsoftplus', got 'softmax'"),
    ],
}
