"""One module per op: SHAPES, the most telling first, and `case(*shape)`, which makes the inputs and the calls to time.

A module whose kernel has tile configurations also has `tuning()`, which lists them, and `dsa tune` searches them.

A module whose cases have peers also has PROBED: small shapes that cover all of the peers' functions and every kind of
argument that their calls depend on. `python -m dsa_bench.peers` calls these.
"""
