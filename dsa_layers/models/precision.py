"""What a model computes in, and on."""

from dataclasses import dataclass
from typing import Any, Literal, Self

import torch

from dsa_layers.arguments import flag, shown
from dsa_layers.config.model_config import ModelConfig

KV_CACHES = ("fp8", "model")
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_LISTED = "torch.bfloat16, torch.float16 or torch.float32"


@dataclass(frozen=True)
class Precision:
    """The dtypes that a model stores and computes in.

    dtype         of activations, and of every weight that is not FP8
    fp8_linear    True: FP8 weights stay FP8 and activations are quantised for them; False: dequantised at load
    fp8_indexer   True: index queries and keys go through Hadamard and e4m3, as the model was trained
    kv_cache      "fp8": latents are cached in 656 bytes a token (V4: 584), rounded to e4m3; "model": in `dtype`
    fp4_experts   True: experts' FP4 weights stay FP4, to be multiplied as FP8; False: they are widened to FP8

    Raises TypeError or ValueError for anything else.
    """

    dtype: torch.dtype
    fp8_linear: bool
    fp8_indexer: bool
    kv_cache: Literal["fp8", "model"]
    fp4_experts: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.dtype, torch.dtype):
            raise TypeError(f"dtype: must be {_LISTED}, got {shown(self.dtype)}")
        if self.dtype not in _DTYPES:
            raise ValueError(f"dtype: must be {_LISTED}, got {self.dtype}")
        flag("fp8_linear", self.fp8_linear)
        flag("fp8_indexer", self.fp8_indexer)
        flag("fp4_experts", self.fp4_experts)
        if self.fp4_experts and not self.fp8_linear:
            raise ValueError(
                "fp4_experts: FP4 weights are multiplied with FP8 activations; accepted with fp8_linear=True"
            )
        if not isinstance(self.kv_cache, str) or self.kv_cache not in KV_CACHES:
            raise ValueError(f"kv_cache: must be {' or '.join(map(repr, KV_CACHES))}, got {shown(self.kv_cache)}")

    @classmethod
    def of(
        cls,
        config: ModelConfig,
        dtype: torch.dtype | None = None,
        *,
        dequantize: bool = False,
        kv_cache: Literal["fp8", "model"] | None = None,
    ) -> Self:
        """What the checkpoint was made for, all FP8 if it holds FP8 weights, else nothing quantised; or what
        `load_model` is told instead."""
        fp8 = config.quantization is not None and not dequantize
        dtype = getattr(torch, config.dtype) if dtype is None else dtype
        return cls(dtype, fp8, fp8, ("fp8" if fp8 else "model") if kv_cache is None else kv_cache)

    def projections(self, config: ModelConfig) -> dict[str, Any]:
        """The options of `make_linear`, and of layers that pass them on."""
        use_ue8m0 = config.quantization is not None and config.quantization.scale_fmt == "ue8m0"
        return {"fp8": self.fp8_linear, "dtype": self.dtype, "use_ue8m0": use_ue8m0}


def check_device(device: torch.device | str | None) -> torch.device:
    """The device to compute on; for None the GPU where there is one, else the CPU. ValueError or TypeError for one that
    models do not run on, or that is not there."""
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not isinstance(device, str | torch.device):
        raise TypeError(f"device: must be a torch.device, its name or None, got {shown(device)}")
    try:
        parsed = torch.device(device)
    except RuntimeError:  # of a name that torch does not know
        parsed = None
    if parsed is None or parsed.type not in ("cpu", "cuda") or (parsed.type == "cpu" and parsed.index):
        raise ValueError(f"device: must be cpu, cuda or cuda:N, got {shown(str(device))}")
    if parsed.type == "cuda":
        if not torch.cuda.is_available():
            raise ValueError(f"device: got {shown(str(device))}, but torch sees no CUDA GPU")
        count = torch.cuda.device_count()
        if parsed.index is not None and parsed.index >= count:
            raise ValueError(f"device: got {shown(str(device))}, but torch sees {count} GPU{'s' * (count > 1)}")
    return parsed
