"""Scales of keys in an FP8 cache, as the products with P take them."""

from cutlass import Int32

from dsa.cute.shared_memory import load_4, load_8
from dsa.kernels.mla.mla_tiles import TILE, VALUE

TABLE_BYTES = 1024
ROOM = 6  # f16 has room for e4m3 times 2^7: the largest scale of a key is below 2 after division by its power


class ScaleTable:
    """What the numbers of a tile's keys are multiplied by for V, which is f16: their scales divided by 2^(e - ROOM),
    e the exponent of the key's largest, so that the products use f16's range; P has the key's 2^e. Two keys are side
    by side, as the products' operands have them.

    d = 576: [4 groups, 32 pairs of keys, 2, 2 keys] f16: the scale rounded, and what the rounding left out.
    d = 512: [8 blocks, 32 pairs, 2 keys] f16, of powers of two; of the last block, which is bf16, 2^(ROOM - e) as bf16.
    So a group whose scale is below 2^-20 of the key's largest loses accuracy: up to 2^-22 of that largest scale.
    """

    def __init__(self, channels: int):
        self.split = channels > VALUE
        self.entry = 8 if self.split else 4
        self.each = TILE // 2 * self.entry

    def place(self, table: Int32, group, key):
        """Where the scale of a key for a group, or block, is; 4 bytes further, what the rounding left out."""
        return table + group * self.each + key // 2 * self.entry + key % 2 * 2

    def of_block(self, table: Int32, block) -> Int32:
        """Where the scales for a block of 64 channels begin."""
        return table + (block // 2 if self.split else block) * self.each

    def pair(self, start: Int32, pair) -> list:
        """Words of the two keys' scales: what was rounded, and what that left out if it did."""
        if self.split:
            return list(load_8(start + pair * self.entry))
        return [load_4(start + pair * self.entry)]
