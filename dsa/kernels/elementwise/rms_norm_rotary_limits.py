"""What the norm with rope takes, in plain numbers and names of torch dtypes; read by kernels, bridges and tests."""

MAX_NORM_ROTARY_CHANNELS = {"bfloat16": 1024, "float16": 1024, "float32": 512}
