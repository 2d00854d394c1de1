"""Other libraries' kernels for comparison: how each is imported, called and compared with ours.

A peer computes the same function. `python -m dsa_bench.peers` calls each once and prints which agree.
"""
