"""Peers, other libraries' kernels for the functions of our ops: how each is imported and called.

`python -m dsa_bench.peers` runs the peers on small shapes and prints which of them agree with the references.
"""
