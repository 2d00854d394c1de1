"""Benchmarks of ops and of whole passes (`e2e`), and the search of tile configurations.

Each benchmark module (dsa_bench/FAMILY/NAME.py) has SHAPES, the most important first, and `case(*shape)`, which makes
the inputs and the calls to time. A module whose kernel has tile configurations also has `tuning()`, which lists the
configurations that `dsa tune` searches.

A module that compares with peers (other libraries' kernels for the same function) also has PROBED: small shapes that
together reach every peer function and every kind of argument. `python -m dsa_bench.peers` checks the peers on these
shapes. Only mha_varlen_fwd, whose peer comes with torch, has no PROBED.
"""
