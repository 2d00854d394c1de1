"""Peers, other libraries' kernels for the same functions: how each is imported, called and compared with ours.

`python -m dsa_bench.peers` calls each peer once and prints which agree.
"""
