"""Draw the pictures of measured figures in docs/pictures from the GPU receipt (tests/gpu/receipt.py).

usage: python -m tests.gpu.pictures
"""

from pathlib import Path

from dsa_bench.e2e import plot
from tests.gpu import receipt
from tests.gpu.receipt_rows import compared, main_entries

FOLDER = receipt.ROOT / "docs" / "pictures"
SPEED_UPS = {
    "flash_mla_with_kvcache": "dense MLA decode",
    "flash_mla_with_kvcache_sparse": "sparse MLA decode",
    "flash_mla_sparse_fwd": "sparse MLA prefill",
    "sliding_window_attention": "window attention",
    "sparse_mla_attention": "sparse MLA backward",
    "fp8_mqa_logits": "index scores",
    "fp8_paged_mqa_logits": "index scores, paged",
    "topk_indices": "top-k",
    "fp8_gemm_nt": "FP8 GEMM",
    "per_token_cast_to_fp8": "FP8 cast",
    "merge_attention": "merge of attention",
    "e2e": "whole passes",
}
COLOR = "#1f6f8b"


def main() -> None:
    entries = main_entries()
    write_speed_ups(FOLDER / "speed-up.png")
    plot.write_passes(entries["e2e"]["bench"], FOLDER / "e2e.png")
    plot.write_parallel(entries["parallel"]["bench"], FOLDER / "parallel.png")
    plot.write_million(entries["million"]["bench"], FOLDER / "million.png")


def write_speed_ups(path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    every = main_entries()
    entries = {name: every[name] for name in SPEED_UPS if compared(every.get(name, {}).get("bench", ()))}
    devices = ", ".join(sorted({entry["device"] for entry in entries.values()}))
    figure, axes = plt.subplots(figsize=(8, 0.36 * len(entries) + 1.6))
    for i, entry in enumerate(reversed(entries.values())):
        ratios = [row["ratio"] for row in compared(entry["bench"])]
        axes.plot([min(ratios), max(ratios)], [i, i], linewidth=1, color=COLOR, alpha=0.35)
        face = "none" if entry["unverified"] else COLOR
        axes.plot(ratios, [i] * len(ratios), "o", color=COLOR, markerfacecolor=face, markersize=5, alpha=0.6)
    axes.axvline(1.0, color="#444444", linewidth=1)
    axes.set_xscale("log")
    ticks = [0.5, 0.75, 1, 1.25, 1.5, 2, 3]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_yticks(range(len(entries)), [SPEED_UPS[name] for name in reversed(entries)])
    axes.set_xlabel(f"speed-up over the best peer, one dot per shape ({devices})\nhollow: measured on an older commit")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)


if __name__ == "__main__":
    main()
