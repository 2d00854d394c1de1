"""What the norm's gradients take, apart from the other kernels' limits, whose code does not change with these."""

MAX_NORM_GRADIENT_CHANNELS = {"bfloat16": 8192, "float16": 8192, "float32": 4096}
MAX_NORM_GRADIENT_ROWS = 2**30  # a turn of all CTAs may begin so many rows ahead
