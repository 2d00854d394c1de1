"""Peers, other libraries' kernels for the functions of our ops: how each is imported and called.

`python -m dsa_bench.peers` calls each peer once and prints which agree with our results.
"""
