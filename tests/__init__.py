"""Limit oneDNN to AVX-512 in the tests, unless the caller sets another limit. Tests compare the bits of results for
different numbers of rows, and with AMX the order of a sum depends on that number. torch reads the variable at its first
matrix product."""

import os

os.environ["ONEDNN_MAX_CPU_ISA"] = os.environ.get("ONEDNN_MAX_CPU_ISA") or "AVX512_CORE"
