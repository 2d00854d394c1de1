"""Rows of whole passes: how they are printed, written as CSV and drawn. `computed` derives the time on more GPUs."""

import csv

import pytest

from dsa_bench.e2e import plot, table
from dsa_bench.e2e.computed import computed
from dsa_bench.e2e.parts import PARTS

PARTS_MS = dict(zip(PARTS, (0.5, 0.25, 2.0, 4.0, 0.25)))
PASS = {"model": "V3.2", "run": "decode 8 x 4096", "tokens": 8, "ms": 8.0, "tokens/s": 1000.0, "parts": PARTS_MS}
WITHOUT_PEERS = PASS | {"peer_ms": None, "ratio": None, "peer_parts": None, "peers": [], "failed": {}}
WITH_PEERS = PASS | {"peer_ms": 10.0, "ratio": 1.25, "peer_parts": PARTS_MS | {"top-k": 1.0}, "failed": {}}
WITH_PEERS |= {"peers": ["deepgemm 2.8.1", "vllm"]}

FIGURES = ("collectives", "shard_ms", "efficiency", "few_layers", "few_ms", "one_gpu_ms", "speedup")
SPLIT = {"model": "V4-Flash", "run": "decode 1 x 8192", "gpus": 2, "layers": 43, "published_layers": 43, "tokens": 1}
SPLIT |= {"ms": 8.0, "tokens/s": 125.0, "memory": 80e9, **dict(zip(FIGURES, (0.125, 7.0, 0.875, 5, 1.0, 1.1, 1.1)))}
ONCE = SPLIT | {"run": "prefill 1048576", "layers": 30} | dict.fromkeys(FIGURES)
PROMPT = {"model": "GLM-5.2", "tokens": 131072, "ms": 2000.0, "parts": PARTS_MS, "workspace": 2**28}


def test_lines_of_a_pass_show_parts_and_the_peers_ratios():
    parts = "".join(f"{ms:10.3f}" for ms in PARTS_MS.values())
    start = f"V3.2      decode 8 x 4096            8.000       1000 | {parts} | "
    assert table.line(WITHOUT_PEERS) == start + "no peer"
    assert table.line(WITHOUT_PEERS | {"failed": {"vllm": "failed: no"}}) == start + "no peer; vllm failed: no"
    ratios = "indexer 1.00, top-k 4.00, attention 1.00"
    assert table.line(WITH_PEERS) == start + f"1.25 ({ratios}; deepgemm 2.8.1, vllm)"
    assert table.head().index("|") == start.index("|")


def test_csv_has_empty_cells_without_peers(tmp_path):
    table.write_csv([WITHOUT_PEERS, WITH_PEERS], tmp_path / "rows.csv")
    without, with_peers = csv.DictReader((tmp_path / "rows.csv").open())
    assert float(with_peers["peers' top-k ms"]) == 1.0 and without["peers' top-k ms"] == without["peers' ms"] == ""
    assert float(without["MoE ms"]) == 4.0 and float(without["tokens/s"]) == 1000.0


@pytest.mark.parametrize(
    ("write", "rows"),
    [
        (plot.write_passes, [WITHOUT_PEERS, WITH_PEERS, WITH_PEERS | {"model": "V4-Flash"}]),
        (plot.write_parallel, [SPLIT, ONCE, SPLIT | {"model": "V3.2"}]),
        (plot.write_million, [PROMPT]),
    ],
)
def test_pictures_are_drawn_also_without_some_figures(write, rows, tmp_path):
    write(rows, tmp_path / "rows.png")
    assert (tmp_path / "rows.png").read_bytes().startswith(b"\x89PNG")


def test_bars_are_cut_at_the_longest():
    assert plot.widths(PARTS_MS, 7.0) == pytest.approx([ms / 7 for ms in PARTS_MS.values()])
    cut = plot.widths(PARTS_MS | {"MoE": 700.0}, 7.0)
    assert cut == pytest.approx([1 / 14, 1 / 28, 2 / 7, plot.LONGEST - 11 / 28, 0])


SILENT = {"model": "V3.2", "run": "decode 1 x 8192", "gpus": 8, "layers": 30, "published_layers": 61, "shard_ms": 3.0}
FOUR = SPLIT | {"model": "V3.2", "gpus": 4, "layers": 20, "published_layers": 61, "ms": 4.0, "shard_ms": 3.4}
TWO = FOUR | {"gpus": 2, "ms": 9.0}
EIGHT = {"run": "decode 8 x 8192", "tokens": 8}
LONG = {"run": "prefill 4096", "tokens": 4096}


# A layer takes 0.1 ms (SILENT's 3 ms / 30 layers) + the measured row's communication / 20 layers.
@pytest.mark.parametrize(
    ("silent", "measured", "ms_of_a_layer"),
    [
        # Only FOUR counts, because it has the most GPUs. Its communication takes 4.0 - 3.4 = 0.6 ms. Rows of other
        # models and rows without shard_ms are ignored.
        (SILENT, [TWO, FOUR, SPLIT, ONCE], 0.1 + 0.6 / 20),
        (SILENT, [TWO], 0.1 + 5.6 / 20),
        # The 0.6 ms that one sequence takes are fixed. The other 0.3 ms transfer rows from 3 GPUs. From 7 GPUs this
        # takes 7 / 3 as long.
        (SILENT | EIGHT, [TWO, FOUR, FOUR | EIGHT | {"ms": 4.3}], 0.1 + (0.6 + 0.3 * 7 / 3) / 20),
        # Eight sequences take less time than one, so all communication counts as fixed.
        (SILENT | EIGHT, [FOUR, FOUR | EIGHT | {"ms": 3.6}], 0.1 + 0.2 / 20),
        (SILENT | LONG, [FOUR | LONG], 0.1 + 0.03 * (7 / 8) / (3 / 4)),
        (SILENT, [], None),
        (SILENT | EIGHT, [FOUR, ONCE | {"model": "V3.2"}], None),
    ],
)
def test_the_time_of_more_gpus_than_the_machine_has(silent, measured, ms_of_a_layer):
    expected = None if ms_of_a_layer is None else pytest.approx(61 * ms_of_a_layer)
    assert computed(silent, measured) == expected
