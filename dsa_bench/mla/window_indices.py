"""Index lists of windows, compared with plain torch operations: bytes written per second."""

from functools import partial

import torch

import dsa
from dsa.reference.mla import window_indices as reference
from dsa_bench.harness.case import Case, bytes_case

# (what, count). "indices": rows of packed keys for `count` queries of a prefill chunk. "pages" and "rings": slots in a
# paged cache or in ring buffers for `count` sequences of a decode batch.
SHAPES = [("indices", 16384), ("indices", 4096), ("pages", 1024), ("pages", 64), ("rings", 64)]
WINDOW, PAGE, MAX_PAGES, SEQUENCES = 128, 64, 512, 16


def _arguments(what: str, count: int) -> tuple:
    if what == "indices":
        ends = torch.linspace(0, count, SEQUENCES + 1, device="cuda").int()
        return ends, ends * 2, count, WINDOW
    lengths = torch.randint(0, PAGE * MAX_PAGES, (count,), dtype=torch.int32, device="cuda")
    if what == "rings":
        return None, lengths, 1, WINDOW, WINDOW
    table = torch.randint(0, 65536, (count, MAX_PAGES), dtype=torch.int32, device="cuda")
    return table, lengths, 1, PAGE, WINDOW


def case(what: str, count: int) -> Case:
    op = "window_indices" if what == "indices" else "window_slots"
    name, inputs = f"{what} of {count}, window {WINDOW}", partial(_arguments, what, count)
    return bytes_case(
        name,
        4 * count * WINDOW,
        inputs,
        {"dsa": getattr(dsa, op), "torch": getattr(reference, op)},
        most=16,
        baselines={"torch"},
    )
