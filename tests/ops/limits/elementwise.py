"""Limits of the ops for norms and rope."""

import torch

from tests.ops.limits.tensors import bf16, row, zeros

LIMITS = [
    (
        "rms_norm",
        lambda a: {"x": torch.zeros(2, 3, 4, 16).transpose(0, 1), "weight": None},
        "x: dimensions 0 to 1 must be mergeable",
    ),
    ("apply_rotary", lambda a: {"x": a["x"][..., :79]}, "x: the kernel takes an even last dimension, got shape"),
    ("apply_rotary", lambda a: {"x": torch.zeros(3, 2, 4, 80).transpose(1, 2)}, "x: dimensions 1 to 2 must be mergeab"),
    (
        "apply_rotary",
        lambda a: {"x": torch.zeros(3, 4, 2, 80), "out": torch.zeros(3, 2, 4, 80).transpose(1, 2)},
        "out: dimensions 1 to 2 must be mergeable",
    ),
    (
        "apply_rotary",
        lambda a: {"x": bf16(2**20, 2**12, 66), "cos": zeros(2**20, 32), "sin": zeros(2**20, 32)},
        "x: the kernel takes at most 4294966272 numbers in rows like these",
    ),
    ("apply_rotary into out", lambda a: {"out": row(a["out"], 3)}, "out: its numbers must not share memory, got str"),
]
