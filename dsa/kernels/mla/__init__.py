"""CuTe DSL kernels for multi-head latent attention (MLA): dense decoding, sparse attention, multi-head attention over
packed sequences, lists of window keys, merges of partial attention results, and FP8 products with kv_b's weights."""
