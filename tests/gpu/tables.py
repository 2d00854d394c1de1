"""Generate the tables of the documents from the GPU receipt (tests/gpu/receipt.py).

To add a table, add an entry to TABLES. Put the lines `<!-- table NAME -->` and `<!-- end of NAME -->` into a page. The
function TABLES[NAME] generates the text between them.

usage: python -m tests.generate
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from dsa_bench.e2e.computed import computed
from dsa_bench.e2e.parts import GLUE, PARTS
from tests.gpu import markdown, receipt, status_table
from tests.gpu.markdown import Column, Row
from tests.gpu.receipt_rows import compared, main_entries

PAGES = (receipt.ROOT / "README.md", *sorted((receipt.ROOT / "docs").rglob("*.md")))
Columns = Mapping[str, Column]


def main() -> None:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        page.write_text(inserted(text), encoding="utf-8")


def inserted(text: str) -> str:
    for name in markdown.names(text):
        text = markdown.inserted(text, name, TABLES[name]())
    return text


def of_entry(name: str, body: Callable[[list[Row]], str]) -> str:
    entry = main_entries().get(name, {"unverified": "no entry"})
    if not entry.get("bench"):
        return f"Not measured on this code: {entry['unverified']}."
    return f"{place(entry)}\n\n{body(entry['bench'])}"


def place(entry: Mapping[str, Any]) -> str:
    where = f"{entry['device']}, torch {entry['torch']}, CuTe DSL {entry['dsl']}"
    text = f"Measured on {where}, on {entry['date']}, commit {entry['commit']}."
    if entry.get("unverified"):
        text += f" Not yet repeated on today's code: {entry['unverified']}."
    return text


def per(field: str, columns: Columns, rows: list[Row]) -> str:
    values = dict.fromkeys(row[field] for row in rows)
    parts = (f"**{value}**\n\n{markdown.table([r for r in rows if r[field] == value], columns)}" for value in values)
    return "\n\n".join(parts)


def milliseconds(ms: float) -> str:
    return f"{ms:#.3g}".rstrip(".")


HEADLINES = (
    ("Index scores, FP8", "fp8_mqa_logits", "4096 x 32768, H 64, D 128, causal, cleaned"),
    ("Top-k, exact and deterministic", "topk_indices", "4096 x 8192, k 2048, normal scores"),
    ("Sparse MLA, prefill", "flash_mla_sparse_fwd", "4096 queries, 32768 keys, d 576, 128 heads, k 2048"),
    ("Sparse MLA, decode, FP8 cache", "flash_mla_with_kvcache_sparse", "B 128, 128 heads, s_q 2, k 2048, 32768 keys"),
    ("Sparse MLA, backward", "sparse_mla_attention", "8192 queries, d 576, 128 heads, k 2048"),
)
PEERS = {"deepgemm": "sgl-deep-gemm", "vllm decode": "vLLM top-k", "cuDNN-FE": "cuDNN frontend"}


def headlines() -> str:
    entries = main_entries()
    found = []
    for what, name, shape in HEADLINES:
        entry = entries.get(name, {})
        rows = [row for row in entry.get("bench", ()) if row["shape"] == shape]
        for row in rows:
            of = f" (commit {entry['commit'][:9]})" if entry["unverified"] else ""
            ratios = [other["ratio"] for other in compared(entry["bench"]) if other["ratio"] is not None]
            peer = {"peer": PEERS.get(row["peer"], row["peer"])}
            found.append(row | peer | {"what": what, "of": of, "least": min(ratios), "most": max(ratios)})
        if not rows:
            found.append({"what": what, "shape": "not measured"})
    columns = {
        "op": "{what}",
        "shape": "{shape}",
        "ours": "{ms:.3f} ms, {figure}{of}",
        "best peer": "{peer_ms:.3f} ms, {peer}",
        "speed-up": "**{ratio:.2f}**",
        "over all shapes": "{least:.2f} to {most:.2f}",
    }
    return markdown.table(found, columns)


def _part_of_peers(part: str) -> Column:
    def ratio(row: Row) -> str:
        if row["ratio"] is None or not row["parts"][part]:
            return ""
        return f"{row['peer_parts'][part] / row['parts'][part]:.2f}"

    return ratio


def _without_glue(row: Row) -> str:
    """Return the speed-up over the peers' pass without the time of GLUE, which only converts tensors for the peers. ""
    if there is none."""
    if row["ratio"] is None or GLUE not in row["peer_parts"]:
        return ""
    return f"{(row['peer_ms'] - row['peer_parts'][GLUE]) / row['ms']:.2f}"


E2E: Columns = {
    "run": "{run}",
    "ms": "{ms:.2f}",
    "tokens/s": "{tokens/s:.0f}",
    **{part: f"{{parts[{part}]:.3f}}" for part in PARTS},
    "speed-up": "{ratio:.2f}",
    "without glue": _without_glue,
    **{f"{part}: speed-up": _part_of_peers(part) for part in ("indexer", "top-k", "attention")},
}
_GB: Columns = {"GB": lambda row: f"{row['memory'] / 1e9:.1f}"}
_PARTS_MS: Columns = {f"{part}, ms": f"{{parts[{part}]:.3f}}" for part in PARTS}
PROMPTS: Columns = {
    "prompt": "{tokens}",
    "s": lambda row: f"{row['ms'] / 1e3:.2f}",
    "tokens/s": "{tokens/s:.0f}",
    **_GB,
    "workspace, MiB": lambda row: f"{row['workspace'] / 2**20:.0f}",
    "last pass, ms": "{pass_ms:.1f}",
    **_PARTS_MS,
}
STEPS: Columns = {"sequences": "{tokens}", "ms": "{ms:.2f}", "tokens/s": "{tokens/s:.0f}", **_GB, **_PARTS_MS}
DRAFTS: Columns = {
    "sequences": "{sequences}",
    "drafts": "{drafts}",
    "plain, ms": "{plain[ms]:.2f}",
    "verifying, ms": "{verify[ms]:.2f}",
    "drafter, ms": "{draft_ms:.2f}",
    "experts with tokens": "{plain[touched]:.0f}, then {verify[touched]:.0f}",
    "bytes of verifying": lambda row: f"{row['verify']['bytes'] / row['plain']['bytes']:.2f}x",
    "time ratio / byte ratio": "{over_bytes:.2f}",
    "% of copy: plain, verifying": "{of_copy[0]:.0%}, {of_copy[1]:.0%}",
    "tokens/s": "{tokens/s:.0f}",
    "gain": "{gain:.2f}",
}
PARALLEL: Columns = {
    "GPUs": "{gpus}",
    "layers": "{layers} of {published_layers}",
    "run": "{run}",
    "ms": "{ms:.2f}",
    "tokens/s": "{tokens/s:.0f}",
    "GB a GPU": _GB["GB"],
    "in collectives": "{collectives:.0%}",
    "without communication, ms": "{shard_ms:.2f}",
    "efficiency": "{efficiency:.2f}",
    "layers that fit one GPU": "{few_layers}",
    "their ms": "{few_ms:.2f}",
    "on one GPU": "{one_gpu_ms:.2f}",
    "speed-up": "{speedup:.2f}",
}
COMPUTED: Columns = {
    "GPUs": "{gpus}",
    "layers measured": "{layers} of {published_layers}",
    "run": "{run}",
    "without communication, ms": "{shard_ms:.2f}",
    "GB a GPU": _GB["GB"],
    "all layers, ms, computed": "{all_ms:.1f}",
    "tokens/s, computed": "{rate:.0f}",
}


def _interval(field: str, form: str) -> Column:
    def text(row: Row) -> str:
        if not row.get(field):
            return ""
        mean, low, high = (form.format(value) for value in row[field])
        return f"{mean} ({low} to {high})"

    return text


ACCURACY: Columns = {
    "kernels": lambda row: row["kernels"] if "error" in row else f"{row['kernels']}: {row['figure']}",
    "loss": "{loss:.4f}",
    "loss - reference loss": _interval("loss_difference", "{:+.5f}"),
    "error": _interval("error", "{:.3%}"),
    "KL": _interval("divergence", "{:.2e}"),
    "top-1 agreement": "{same_first:.2%}",
    "error / peers' error": _interval("over_peers", "{:.3f}"),
}


def _parallel(rows: list[Row]) -> str:
    return per("model", PARALLEL, [row for row in rows if "efficiency" in row])


def _parallel_computed(rows: list[Row]) -> str:
    """The times of `dsa_bench.e2e.computed` come from one GPU's part, and from communication measured with fewer
    GPUs."""
    measured, silent = ([row for row in rows if ("efficiency" in row) is is_whole] for is_whole in (True, False))
    found = []
    for row in silent:
        ms = computed(row, measured)
        found.append(dict(row) | {"all_ms": ms, "rate": row["tokens"] / ms * 1e3 if ms else None})
    return per("model", COMPUTED, found)


def _million(rows: list[Row], steps: bool) -> str:
    return per("model", STEPS if steps else PROMPTS, [row for row in rows if (row["workspace"] is None) is steps])


def _joined(rows: list[Row]) -> list[dict[str, Any]]:
    """Join rows whose shape is "PASS, KEY" into one row per key: {"shape": KEY, PASS: row}."""
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        which, shape = row["shape"].split(", ", 1)
        found.setdefault(shape, {"shape": shape})[which] = row
    return [*found.values()]


def _yardstick(row: Row) -> float:
    """Return the milliseconds of the row's only yardstick (see `yardsticks` in dsa_bench/harness/case.py)."""
    (found,) = row["yardsticks"].values()
    return found["ms"]


def _pass_ms(name: str) -> Column:
    return lambda row: milliseconds(row[name]["ms"]) if name in row else ""


def _over_yardstick(name: str) -> Column:
    return lambda row: f"{row[name]['ms'] / _yardstick(row[name]):.2f}" if name in row else ""


WARMUP: Columns = {
    "sequences x tokens, heads of q k/v": "{shape}",
    "forward with gradients, ms": _pass_ms("forward"),
    "over FA2's forward": _over_yardstick("forward"),
    "backward, ms": _pass_ms("backward"),
    "with weights that differ, ms": _pass_ms("weighted backward"),
    "figure": "{forward[figure]}",
}
ATTENTION: Columns = {
    "backward pass": "{shape}",
    "ms": lambda row: milliseconds(row["ms"]),
    "rate": "{figure}",
    "the peer's ms": lambda row: milliseconds(row["peer_ms"]) if row["peer_ms"] else "",
    "speed-up": "{ratio:.2f}",
}
LOSS: Columns = {
    "shape": "{shape}",
    "forward, ms": _pass_ms("forward"),
    "over attention's forward": _over_yardstick("forward"),
    "backward, ms": _pass_ms("backward"),
    "deterministic backward, ms": _pass_ms("deterministic backward"),
}
LATENCY: Columns = {
    "model": "{model}",
    "chunk": "{prefill_chunk}",
    "ms between tokens, median": "{ms:.1f}",
    "largest": "{ms_max:.1f}",
    "without the prompt, median": "{alone_ms:.1f}",
    "without it, largest": "{alone_ms_max:.1f}",
    "prompt's first token, s": "{first_token_s:.2f}",
}

ENGINE: Columns = {
    "load": "{load}",
    "without": lambda row: _of_engine(row, "alone"),
    "with the plugin": lambda row: _of_engine(row, "plugin"),
    "speed-up": "{ratio:.2f}",
    "first token, ms (median, 99th)": lambda row: _pair(row, "first_token_ms"),
    "between tokens, ms (median, 99th)": lambda row: _pair(row, "between_ms"),
    "peak, GiB": lambda row: f"{row['alone']['peak_gib']:.1f} / {row['plugin']['peak_gib']:.1f}",
}


TRANSFORMERS: Columns = {
    "": "{run}",
    "tokens": "{tokens}",
    "eager": "{eager[figure]}",
    "sdpa": "{sdpa[figure]}",
    "dsa": "{dsa[figure]}",
    "dsa, `fp8_indexer=True`": "{dsa, FP8 index scores[figure]}",
}


def _transformers(rows: list[Row]) -> str:
    """A row per run and number of tokens, with the figures of all ways."""
    found: dict[tuple[str, int], Row] = {}
    for row in rows:
        found.setdefault((row["run"], row["tokens"]), {"run": row["run"], "tokens": row["tokens"]})[row["way"]] = row
    return markdown.table([*found.values()], TRANSFORMERS)


def _of_engine(row: Row, side: str) -> str:
    figures = row[side]
    if "ms_per_step" in figures:
        return f"{figures['ms_per_step']:.2f} ms a step"
    return f"{figures['tokens_per_second'] / 1e3:.1f}k tokens/s"


def _pair(row: Row, name: str) -> str:
    """Both sides' median and 99th percentile; nothing for prompts, which have no next token."""
    if name not in row["alone"]:
        return ""
    return " / ".join(f"{row[side][name]:.1f}, {row[side][f'{name}_99']:.1f}" for side in ("alone", "plugin"))


TABLES: dict[str, Callable[[], str]] = {
    "headlines": headlines,
    "status": status_table.tables,
    "e2e": partial(of_entry, "e2e", partial(per, "model", E2E)),
    "parallel": partial(of_entry, "parallel", _parallel),
    "parallel_computed": partial(of_entry, "parallel", _parallel_computed),
    "million_prompts": partial(of_entry, "million", partial(_million, steps=False)),
    "million_steps": partial(of_entry, "million", partial(_million, steps=True)),
    "drafts": partial(of_entry, "drafts", partial(per, "model", DRAFTS)),
    "latency": partial(of_entry, "latency", lambda rows: markdown.table(rows, LATENCY)),
    "against_transformers": partial(of_entry, "against_transformers", _transformers),
    "vllm_engine": partial(of_entry, "vllm_engine", partial(per, "model", ENGINE)),
    "sglang_engine": partial(of_entry, "sglang_engine", partial(per, "model", ENGINE)),
    "accuracy": partial(of_entry, "accuracy", partial(per, "model", ACCURACY)),
    "indexer_warmup_attention": partial(
        of_entry, "indexer_warmup_attention", lambda rows: markdown.table(_joined(rows), WARMUP)
    ),
    "sparse_mla_attention": partial(of_entry, "sparse_mla_attention", lambda rows: markdown.table(rows, ATTENTION)),
    "sparse_indexer_loss": partial(of_entry, "sparse_indexer_loss", lambda rows: markdown.table(_joined(rows), LOSS)),
}
