"""Limits of the norm with RoPE, as plain numbers and names of torch dtypes, for kernels, ops and tests."""

MAX_NORM_ROTARY_CHANNELS = {"bfloat16": 1024, "float16": 1024, "float32": 512}
