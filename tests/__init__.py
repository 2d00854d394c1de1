"""Tests compare bits between different numbers of rows, which AMX sums in another order. So oneDNN goes up to AVX-512
here, unless the caller has set something else; torch reads the variable when it first multiplies."""

import os

os.environ["ONEDNN_MAX_CPU_ISA"] = os.environ.get("ONEDNN_MAX_CPU_ISA") or "AVX512_CORE"
