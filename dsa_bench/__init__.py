"""One module per op: SHAPES, the most telling first, and `case(*shape)`, which makes the inputs and the calls to time.

A module whose kernel has tile configurations also has `tuning(kernels)`, and `dsa tune` searches them: it gets the
module or modules that the op's declaration names for the GPU's arch, of which each arch's have the same names.

A module whose cases have peers also has PROBED: small shapes with all of the peers' functions, and every kind of
argument that their calls depend on. `python -m dsa_bench.peers` calls these.
"""
