"""Limit oneDNN to AVX-512 in the tests, unless the caller sets another limit.

Tests require that a row of a matrix product has the same bits for any number of rows. With AMX, the order of oneDNN's
sums depends on the number of rows. oneDNN reads the variable at the first product, so it is set before any test module
is imported.
"""

import os

os.environ["ONEDNN_MAX_CPU_ISA"] = os.environ.get("ONEDNN_MAX_CPU_ISA") or "AVX512_CORE"
