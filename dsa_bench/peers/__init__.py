"""The other libraries' kernels that benchmarks stand beside: how each is imported, called and compared with ours.

A peer computes the same function. `python -m dsa_bench.peers` calls every one of them once and says which agree.
"""
