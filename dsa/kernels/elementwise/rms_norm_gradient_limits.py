"""Limits of the norm's gradients. They are not in limits.py, so that changing them leaves other kernels' code alone."""

MAX_NORM_GRADIENT_CHANNELS = {"bfloat16": 8192, "float16": 8192, "float32": 4096}
MAX_NORM_GRADIENT_ROWS = 2**30  # leaves room in int32 for row indices past the end in the last iteration
