"""CuTe DSL kernels of norm, rotary embedding and hyper connections."""
