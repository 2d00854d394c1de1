"""The dtypes and the device that a model computes with."""

import re
from dataclasses import dataclass
from typing import Any, Literal, Self

import torch

from dsa.runtime.checks import check_choice, check_flag, shown
from dsa_layers.config.model_config import ModelConfig


@dataclass(frozen=True)
class Precision:
    """The dtypes that a model stores and computes in.

    dtype         dtype of activations and of unquantised weights, except weights that are always fp32, such as norms
    fp8_linear    True: FP8 weights stay in FP8, and layers quantise their activations. False: the loader dequantises
                  FP8 and FP4 weights
    fp8_indexer   True: cast index queries and keys to e4m3 (`LightningIndexer`)
    kv_cache      "fp8": cache e4m3 latents and bf16 rope keys in 656 bytes per token; in V4, 584 bytes per window token
                  and per compressed entry. "model": cache them in `dtype`
    fp4_experts   True: FP4 weights of experts stay in FP4, and activations are FP8; requires fp8_linear. False: if
                  fp8_linear, the loader converts FP4 weights to FP8

    The constructor raises TypeError or ValueError for other values.
    """

    dtype: torch.dtype
    fp8_linear: bool
    fp8_indexer: bool
    kv_cache: Literal["fp8", "model"]
    fp4_experts: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            error = ValueError if isinstance(self.dtype, torch.dtype) else TypeError
            raise error(f"dtype: must be torch.bfloat16, torch.float16 or torch.float32, got {shown(self.dtype)}")
        for name in ("fp8_linear", "fp8_indexer", "fp4_experts"):
            check_flag(name, getattr(self, name))
        check_choice("kv_cache", self.kv_cache, ("fp8", "model"))

    @classmethod
    def of(
        cls,
        config: ModelConfig,
        dtype: torch.dtype | None = None,
        *,
        dequantize: bool = False,
        kv_cache: Literal["fp8", "model"] | None = None,
    ) -> Self:
        """Return the precision for a checkpoint.

        If the checkpoint has quantised weights, use FP8 for linear layers, indexer and, if `config.has_fp8_cache`, the
        cache; otherwise quantise nothing. The arguments override these defaults. The result has fp4_experts=False.

        dtype       dtype of activations; None for the dtype in the configuration
        dequantize  whether to dequantise the weights and use FP8 nowhere, except in the cache if `kv_cache` is "fp8"
        kv_cache    storage of the cache, "fp8" or "model"; None for the default
        """
        fp8 = config.quantization is not None and not dequantize
        dtype = getattr(torch, config.dtype) if dtype is None else dtype
        if kv_cache == "fp8" and not config.has_fp8_cache:
            raise ValueError("kv_cache: must be 'model', because FP8 caches do not have this model's sizes, got 'fp8'")
        if kv_cache is None:
            kv_cache = "fp8" if fp8 and config.has_fp8_cache else "model"
        return cls(dtype, fp8, fp8, kv_cache)

    def projections(self, config: ModelConfig) -> dict[str, Any]:
        """Return the keyword arguments fp8, dtype and use_ue8m0 of `make_linear`."""
        return {"fp8": self.fp8_linear, "dtype": self.dtype, "use_ue8m0": config.use_ue8m0}


def check_device(device: torch.device | str | None) -> torch.device:
    """Return the device to compute on; for None, the GPU if there is one, else the CPU. Raise TypeError or ValueError
    unless it is a CPU or a CUDA device that torch finds."""
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not isinstance(device, str | torch.device):
        raise TypeError(f"device: must be a torch.device, its name or None, got {shown(device)}")
    if not re.fullmatch(r"cpu(:0)?|cuda(:\d+)?", str(device)):
        raise ValueError(f"device: must be cpu, cuda or cuda:N, got {shown(str(device))}")
    device = torch.device(device)
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device.type == "cuda" and (device.index or 0) >= count:
        sees = f"{count} GPU{'s' * (count > 1)}" if count else "no CUDA GPU"
        raise ValueError(f"device: got {shown(str(device))}, but torch sees {sees}")
    return device
