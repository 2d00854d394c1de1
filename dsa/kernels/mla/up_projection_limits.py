"""Limits of the products with kv_b in FP8. Free of CUTLASS, so that ops can check without importing it."""

ABSORBED_NOPE = (128, 192)  # non-rope channels of a head's q where W_UK is FP8: V3.2, GLM-5
UP_PROJECTION_ROWS = 32  # rows of kv_b per head are a multiple of this
MAX_UP_PROJECTION_ROWS = 2**22 - 1  # largest number of rows of kv_b, so that offsets fit in int32
VALUE_GROUP = 128  # channels of a head's values that share a scale
