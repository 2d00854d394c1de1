"""Profiles of an op: the torch profiler's table, and percentages of peak that ncu measures.

ncu profiles `python -m dsa_bench.harness.profile OP`, which calls the op's first case a few times.
"""

import csv
import shutil
import subprocess
import sys

import torch

from dsa_bench.harness.case import Case, load

CALLS = 3
# {ncu's metric: label}: how busy a possible bottleneck is, in percent of the peak.
METRICS = {
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active": "tensor pipe",
    "sm__inst_issued.avg.pct_of_peak_sustained_active": "issue slots",
    "lts__throughput.avg.pct_of_peak_sustained_elapsed": "L2",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "DRAM",
}


def both_tables(op: str) -> str:
    module = load(op)
    first = module.case(*module.SHAPES[0])
    return f"{op}: {first.name}\n{torch_table(first)}\n{ncu_table(op)}"


def torch_table(case: Case) -> str:
    case.calls["dsa"][0]()
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        _call(case)
    return profile.key_averages().table(sort_by="cuda_time_total", row_limit=12, max_name_column_width=60)


def _call(case: Case) -> None:
    calls = case.calls["dsa"]
    for i in range(CALLS):
        calls[i % len(calls)]()
    torch.cuda.synchronize()


def ncu_table(op: str) -> str:
    """Return `ncu_report` of the CuTe DSL kernels that the op launches, whose names contain "cutlass". If the report is
    missing, return a line that says why."""
    ncu = shutil.which("ncu")
    if ncu is None:
        return "ncu is not on the PATH: no shares of the tensor pipe, issue slots, L2 and DRAM"
    command = [ncu, "--clock-control", "none", "--csv", "--page", "raw", "--print-units", "base", "-k", "regex:cutlass"]
    command += ["--metrics", ",".join(["gpu__time_duration.sum", *METRICS])]
    run = subprocess.run(
        [*command, sys.executable, "-m", "dsa_bench.harness.profile", op], capture_output=True, text=True
    )
    rows = list(csv.DictReader(line for line in run.stdout.splitlines() if line.startswith('"')))
    if run.returncode or not rows:
        return f"ncu failed ({run.returncode}): {(run.stderr or run.stdout)[-500:].strip()}"
    return ncu_report(rows)


def ncu_report(rows: list[dict[str, str]]) -> str:
    """Return a line per kernel: microseconds and METRICS of the last launch, without the metrics that this GPU
    lacks."""
    last = {row["Kernel Name"]: row for row in rows if row["Kernel Name"]}
    lines = []
    for name, row in last.items():
        shares = {label: _number(row.get(metric, "")) for metric, label in METRICS.items()}
        known = ", ".join(f"{label} {share:.0f}%" for label, share in shares.items() if share is not None)
        lines.append(f"{_number(row['gpu__time_duration.sum']) / 1e3:9.1f} us  {known}  {name[:80]}")
    return "\n".join(lines)


def _number(text: str) -> float | None:
    digits = text.replace(",", "")
    return float(digits) if digits[:1].isdigit() else None


if __name__ == "__main__":
    module = load(sys.argv[1])
    _call(module.case(*module.SHAPES[0]))
