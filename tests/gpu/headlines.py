"""The README's six results and their picture, from the GPU receipt.

Both are a choice of what says most about this project, made by hand: a new op is in neither until somebody puts it
there. docs/status.md has all results.

usage: python -m tests.gpu.headlines    (the picture; `python -m tests.generate` writes the table)
"""

from pathlib import Path
from typing import Any

from tests.gpu import receipt

PATH, PICTURE = receipt.ROOT / "README.md", receipt.ROOT / "docs" / "speed-up.png"
BEGIN, END = "<!-- headlines: python -m tests.generate -->", "<!-- end of headlines -->"
# What is said, the entry, and the shape whose figure it is.
ROWS = [
    ("Sparse MLA, prefill", "flash_mla_sparse_fwd", "4096 queries, 32768 keys, d 576, 128 heads, k 2048"),
    ("Sparse MLA, decoding from an FP8 cache", "flash_mla_with_kvcache_sparse", "B 128, 128 heads, s_q 2, k 2048"),
    ("Lightning indexer's scores, FP8", "fp8_mqa_logits", "4096 x 32768, H 64, D 128, causal, cleaned"),
    ("Top-k, exact and deterministic", "topk_indices", "4096 x 8192, k 2048, normal scores"),
    ("Sparse MLA's gradients", "sparse_mla_attention", "8192 queries, d 576, 128 heads"),
    ("A pass of V3.2's layers, 131072-token prompt", "e2e", "V3.2 prefill 131072"),
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


def table() -> str:
    """Six rows: what, our figure at one shape, how many times as fast as the best peer there and over all shapes."""
    entries = _entries()
    lines = ["| | figure | speed-up over the best peer |", "|---|---|---|"]
    for what, name, shape in ROWS:
        entry = entries.get(name, {"unverified": "no entry"})
        rows = [row for row in entry.get("bench", ()) if row["shape"].startswith(shape)]
        if not rows:
            lines.append(f"| {what} | not yet run on this code: {entry['unverified']} | |")
            continue
        row, ratios = rows[0], ratios_of(entry)
        over = f"{row['ratio']:.2f}; {min(ratios):.2f} to {max(ratios):.2f} over {len(ratios)} shapes"
        of = f", on the code of {entry['commit'][:9]}" if entry["unverified"] else ""
        lines.append(f"| {what} ({row['shape']}) | {row['figure']}{of} | {over} ({row['peer']}) |")
    return "\n".join(lines)


def _entries() -> dict[str, dict[str, Any]]:
    """Those of the arch on which most is measured."""
    data = receipt.load()
    verified = {arch: [name for name in data[arch] if not data[arch][name]["unverified"]] for arch in sorted(data)}
    return data[max(verified, key=lambda arch: len(verified[arch]))]


def ratios_of(entry: dict[str, Any]) -> list[float]:
    """The best peer's time over ours, of each shape that a peer takes."""
    return [row["ratio"] for row in entry.get("bench", ()) if row.get("ratio") is not None]


def inserted(text: str) -> str:
    """The README's text with today's table."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


def write_picture(path: Path) -> None:
    """A dot for each measured shape, a row for each op that has peers."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    entries = {name: entry for name, entry in _entries().items() if name in PICTURED and ratios_of(entry)}
    shown = [(label, ratios_of(entries[name])) for name, label in PICTURED.items() if name in entries]
    devices = ", ".join(sorted({entry["device"] for entry in entries.values()}))
    figure, axes = plt.subplots(figsize=(8, 0.36 * len(shown) + 1.2))
    for i, (_, ratios) in enumerate(reversed(shown)):
        axes.plot(ratios, [i] * len(ratios), "o", markersize=5, alpha=0.55, color="#1f6f8b", markeredgewidth=0)
        axes.plot([min(ratios), max(ratios)], [i, i], linewidth=1, color="#1f6f8b", alpha=0.35)
    axes.axvline(1.0, color="#444444", linewidth=1)
    axes.set_xscale("log")
    ticks = [0.5, 0.75, 1, 1.25, 1.5, 2, 3]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_yticks(range(len(shown)), [label for label, _ in reversed(shown)])
    axes.set_xlabel(f"the best peer's time / ours, one dot a shape ({devices}, same run)")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    write_picture(PICTURE)
