"""What a model computes in."""

from dataclasses import dataclass
from typing import Literal, Self

import torch

from dsa_layers.config import ModelConfig


@dataclass(frozen=True)
class Precision:
    """dtype      of activations, and of every weight that is not FP8
    fp8_linear    True: FP8 weights stay FP8 and activations are quantised for them; False: dequantised at load
    fp8_indexer   True: index queries and keys go through Hadamard and e4m3, as the model was trained
    kv_cache      "fp8": latents are cached in 656 bytes a token (V4: 584), rounded to e4m3; "model": in `dtype`
    """

    dtype: torch.dtype
    fp8_linear: bool
    fp8_indexer: bool
    kv_cache: Literal["fp8", "model"]

    @classmethod
    def of(cls, config: ModelConfig, dtype: torch.dtype | None = None) -> Self:
        """What the checkpoint was made for: all FP8 if it holds FP8 weights, else nothing quantised."""
        fp8 = config.quantization is not None
        return cls(dtype or getattr(torch, config.dtype), fp8, fp8, "fp8" if fp8 else "model")
