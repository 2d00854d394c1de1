"""Names that have moved."""

from dsa.cute.copies import tile_load as tile_load
from dsa.cute.pipeline import init_ring as init_ring
from dsa.cute.sm90 import REGISTERS as REGISTERS
from dsa.cute.sm90 import SHARED_BYTES as SHARED_BYTES
from dsa.cute.sm90 import WARPGROUP as WARPGROUP
from dsa.cute.wgmma import multiply as multiply
