"""CuTe DSL kernels of norms, rotary embedding and hyper-connections."""
