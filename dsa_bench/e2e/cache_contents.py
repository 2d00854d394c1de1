"""What the caches of a step hold that no pass has computed: normal numbers, stored as the layers store theirs.

Which keys a step selects follows from them, and how long a selection takes depends on how scores are spread: those of
normal keys are as far apart as a prompt's, no two of them equal, where keys of a few bit patterns would be bunched.
"""

import torch

import dsa
from dsa_layers.cache.cache import Cache
from dsa_layers.cache.kv_cache import LATENT_FP8_BYTES

_V4_BYTES = 584
_TOKENS = 2**15  # at a time
_STATE = 2**-8  # of the projections that unfinished blocks are made of: little beside a token's own


@torch.inference_mode()
def fill(cache: Cache) -> None:
    """By torch's generator of the cache's device."""
    states = {id(tensor) for tensor in cache.state_tensors() if tensor.dtype == torch.float32}
    for tensor in cache.tensors():
        if id(tensor) in states:
            tensor.normal_(std=_STATE)
        elif tensor.dtype == torch.uint8:
            _fill_bytes(tensor.flatten(0, -4))
        else:
            tensor.normal_()


def _fill_bytes(pages: torch.Tensor) -> None:
    """pages [pages, P, 1, bytes]: 656 or 584 bytes are latents, others index keys with 4 bytes of a scale."""
    slots, width, device = len(pages) * pages.shape[1], pages.shape[3], pages.device
    channels = {LATENT_FP8_BYTES: 576, _V4_BYTES: 512}.get(width)
    for begin in range(0, slots, _TOKENS):
        places = torch.arange(begin, min(begin + _TOKENS, slots), device=device)
        rows = torch.randn(len(places), channels or width - 4, dtype=torch.bfloat16, device=device)
        if channels is None:
            keys, scales = dsa.per_token_cast_to_fp8(rows, True)
            dsa.write_indexer_cache(keys, scales[:, 0], pages, places)
        else:
            dsa.write_kv_cache(rows, pages, places)
