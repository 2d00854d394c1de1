"""DeepSeek Sparse Attention for NVIDIA Hopper. The public ops, and the choice of their backend.

Importing this package imports torch only: no CuTe DSL, no CUDA initialisation.
"""

from dsa.backends import backend, use_backend
from dsa.ops.per_token_cast_to_fp8 import per_token_cast_to_fp8

__version__ = "0.1.0"

__all__ = ["backend", "per_token_cast_to_fp8", "use_backend"]
