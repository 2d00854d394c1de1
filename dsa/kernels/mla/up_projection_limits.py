"""What the products with kv_b in FP8 take; free of CUTLASS, so that ops can check without it."""

ABSORBED_NOPE = (128, 192)  # channels of a head's queries in front of rope, where W_UK is FP8: V3.2's, GLM-5's
UP_PROJECTION_ROWS = 32  # of kv_b: a head has a multiple of them
MAX_UP_PROJECTION_ROWS = 2**22 - 1  # of kv_b: places in it are int32
VALUE_GROUP = 128  # channels of a head's values that share a scale
