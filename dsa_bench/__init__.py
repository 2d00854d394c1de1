"""One module per op: SHAPES, the most telling first, and `case(*shape)`, which makes the inputs and the calls to time.

A module whose kernel has tile configurations also has `tuning()`, and `dsa tune` searches them.
"""
