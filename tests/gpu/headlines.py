"""The README's six results and their picture, from the GPU receipt.

Both are a choice of what says most about this project, made by hand: a new op is in neither until somebody puts it
there. docs/status.md has all results.

usage: python -m tests.gpu.headlines    (the picture; `python -m tests.generate` writes the table)
"""

from pathlib import Path
from typing import Any

from tests.gpu import receipt
from tests.gpu.receipt_rows import (
    beside_peers,
    compared,
    main_entries,
    names_of,
    other_kind,
    other_kinds,
    shape_of,
)

PATH, PICTURE = receipt.ROOT / "README.md", receipt.ROOT / "docs" / "speed-up.png"
BEGIN, END = "<!-- headlines: python -m tests.generate -->", "<!-- end of headlines -->"
# What is said, the entry, and the shape whose figure it is.
ROWS = [
    ("Sparse MLA, prefill", "flash_mla_sparse_fwd", "4096 queries, 32768 keys, d 576, 128 heads, k 2048"),
    ("Sparse MLA, decoding from an FP8 cache", "flash_mla_with_kvcache_sparse", "B 128, 128 heads, s_q 2, k 2048"),
    ("Lightning indexer's scores, FP8", "fp8_mqa_logits", "4096 x 32768, H 64, D 128, causal, cleaned"),
    ("Top-k, exact and deterministic", "topk_indices", "4096 x 8192, k 2048, normal scores"),
    ("Sparse MLA's gradients", "sparse_mla_attention", "8192 queries, d 576, 128 heads"),
    ("A pass of some of V3.2's layers, 131072-token prompt", "e2e", "V3.2 prefill 131072"),
]
# Chosen entries with peers, as the picture names them.
PICTURED = {
    "flash_mla_with_kvcache": "dense MLA decode",
    "flash_mla_with_kvcache_sparse": "sparse MLA decode",
    "flash_mla_sparse_fwd": "sparse MLA prefill",
    "sliding_window_attention": "window attention",
    "sparse_mla_attention": "sparse MLA, gradients",
    "fp8_mqa_logits": "index scores",
    "fp8_paged_mqa_logits": "index scores, paged",
    "topk_indices": "top-k",
    "fp8_gemm_nt": "FP8 products",
    "per_token_cast_to_fp8": "FP8 cast",
    "merge_attention": "merge of attention",
    "e2e": "whole passes",
}
COLOR = "#1f6f8b"
_DOT = {"marker": "o", "linestyle": "", "color": COLOR, "markersize": 5}
MARKS: dict[str, dict[str, Any]] = {
    "today's code": _DOT | {"alpha": 0.55, "markeredgewidth": 0},
    "earlier code: today's is unverified": _DOT | {"alpha": 0.8, "markerfacecolor": "none", "markeredgewidth": 0.8},
    # And those of OTHER_KINDS.
    "deterministic beside one that is not": _DOT | {"marker": "x", "markeredgewidth": 1.5},
    "float16 accumulators beside float32 ones": _DOT | {"marker": "1", "markeredgewidth": 1.5, "markersize": 8},
    "the plan alone": _DOT | {"marker": "|", "markeredgewidth": 1.5, "markersize": 8},
    "where a pass waits for the host": _DOT | {"marker": "+", "markeredgewidth": 1.5, "markersize": 7},
}


def table() -> str:
    """Six rows: what, our figure at one shape, how many times as fast as the best peer there, which that is, and over
    all shapes, with all peers that are the best at one."""
    entries = main_entries()
    lines = ["| | figure | speed-up over the best peer |", "|---|---|---|"]
    for what, name, shape in ROWS:
        entry = entries.get(name, {"unverified": "no entry"})
        rows = [row for row in entry.get("bench", ()) if row["shape"].startswith(shape)]
        if not rows:
            lines.append(f"| {what} | not yet run on this code: {entry['unverified']} | |")
            continue
        row, alike = rows[0], compared(entry["bench"])
        ratios = [row["ratio"] for row in alike]
        over = f"{row['ratio']:.2f} ({row['peer']}); {min(ratios):.2f} to {max(ratios):.2f} over {len(ratios)} shapes"
        peers = names_of(alike)
        over += f" ({'the same' if peers == row['peer'] else peers}){other_kinds(entry['bench'])}"
        of = f", on the code of {entry['commit'][:9]}" if entry["unverified"] else ""
        lines.append(f"| {what} ({shape_of(name, row)}) | {row['figure']}{of} | {over} |")
    return "\n".join(lines)


def inserted(text: str) -> str:
    """The README's text with today's table."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


def write_picture(path: Path) -> list[str]:
    """A mark for each measured shape, a row for each op that has peers. Which kinds of marks there are."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    every = main_entries()
    entries = {name: every[name] for name in PICTURED if compared(every.get(name, {}).get("bench", ()))}
    devices = ", ".join(sorted({entry["device"] for entry in entries.values()}))
    figure, axes = plt.subplots(figsize=(8, 0.36 * len(entries) + 2.0))
    used = set()
    for i, entry in enumerate(reversed(entries.values())):
        ratios = [row["ratio"] for row in compared(entry["bench"])]
        axes.plot([min(ratios), max(ratios)], [i, i], linewidth=1, color=COLOR, alpha=0.35)
        for row in beside_peers(entry["bench"]):
            mark = other_kind(row) or ("earlier code: today's is unverified" if entry["unverified"] else "today's code")
            used.add(mark)
            axes.plot(row["ratio"], i, **MARKS[mark])
    shown = [mark for mark in MARKS if mark in used]
    lines = [plt.Line2D([], [], **MARKS[mark]) for mark in shown]
    below = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.12), "ncols": 2}  # inside it would hide marks
    axes.legend(lines, shown, fontsize=8, **below)
    axes.axvline(1.0, color="#444444", linewidth=1)
    axes.set_xscale("log")
    ticks = [0.5, 0.75, 1, 1.25, 1.5, 2, 3]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_yticks(range(len(entries)), [PICTURED[name] for name in reversed(entries)])
    axes.set_xlabel(f"the best peer's time / ours, one mark a shape ({devices}, same run)")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return shown


if __name__ == "__main__":
    write_picture(PICTURE)
