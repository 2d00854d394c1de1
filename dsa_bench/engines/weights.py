"""Random weights for an engine's model, so that activations stay of order 1 and tokens go to different experts."""

import math
import re

import torch


def fill(name: str, values: torch.Tensor, generator: torch.Generator) -> None:
    """Fill a parameter or buffer by its name and dtype, in the form that the checkpoint has it."""
    kind = values.dtype
    if kind == torch.float8_e4m3fn:
        # torch has no random FP8. These bytes have a random sign, a magnitude from 1/4 to below 1, and any mantissa.
        bits = values.view(torch.uint8).random_(0, 32, generator=generator)
        bits.add_(bits & 0x10, alpha=7).add_(0x28)
    elif "scale" in name and (kind == torch.uint8 or kind == torch.float8_e8m0fnu):
        # Channels per scale and the random codes' root mean square: FP4 experts (3 dimensions), else FP8 blocks.
        per_scale, size = (32, 2.93) if values.dim() == 3 else (128, 0.58)
        exponent = round(-math.log2(size * math.sqrt(values.shape[-1] * per_scale)))
        values.view(torch.uint8).fill_(127 + exponent)
    elif "weight_scale" in name and kind == torch.float32:
        values.fill_(1 / (0.58 * math.sqrt(values.shape[-1] * 128)))
    elif kind in (torch.uint8, torch.int8):
        values.view(torch.uint8).random_(0, 256, generator=generator)
    elif not values.is_floating_point():
        values.random_(0, 256, generator=generator)  # the experts of a token in a layer that routes by a table
    elif values.dim() == 1:
        values.fill_(float(re.search(r"norm\.weight$|scale$", name) is not None))  # 1: norms, scales; 0: biases, sinks
    else:
        values.normal_(0, values.shape[-1] ** -0.5, generator=generator)
