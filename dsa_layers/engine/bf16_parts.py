"""An fp32 matrix for the tensor cores: three bf16 parts, whose products with bf16 numbers are exact in fp32."""

import torch


class BF16Parts:
    """of(W): the parts of an fp32 matrix W [O, I], which `dsa.hyper_mix` takes.

    W = hi + mid + lo to 2^-24 of each number, but for numbers that bf16 cannot hold (above 3.39e38). The parts, bf16
    [3, O, I], are made at the first use and kept. After W has been changed in place or replaced, the next use, or
    `update`, makes them again, in the same memory where that is possible, so that a CUDA graph captured earlier reads
    the new parts. After a change that PyTorch does not see, through `.data` or from outside, call `forget`.
    """

    def __init__(self) -> None:
        self._of: torch.Tensor | None = None
        self._version = -1
        self._parts: torch.Tensor | None = None

    def __reduce__(self) -> tuple[type["BF16Parts"], tuple[()]]:
        return type(self), ()  # a copy's matrix is another one

    def of(self, weight: torch.Tensor) -> torch.Tensor:
        """The parts: bf16 [3, O, I]."""
        if self._is_current(weight):
            return self._parts
        # A tensor of inference mode does not count its changes. What a graph being captured computes is there only
        # when it is replayed: it makes its own parts, each time.
        if weight.is_inference() or (weight.is_cuda and torch.cuda.is_current_stream_capturing()):
            return _split(weight)
        with torch.inference_mode(False), torch.no_grad():  # or the parts could not be overwritten later
            parts = _split(weight)
            held = self._parts
            if held is not None and held.shape == parts.shape and held.device == parts.device:
                parts = held.copy_(parts)
            # An alias: the memory is nobody else's as long as it is compared with, and changes are counted in common.
            self._of, self._version, self._parts = weight.detach(), weight._version, parts
        return parts

    def update(self, weight: torch.Tensor) -> None:
        """Make parts that are kept those of `weight` as it is now; drop them if it went to another device."""
        if self._parts is None:
            return
        if self._parts.device == weight.device:
            self.of(weight)
        else:
            self.forget()

    def forget(self) -> None:
        self._of = self._parts = None

    def _is_current(self, weight: torch.Tensor) -> bool:
        known = self._of
        return (
            known is not None
            and not weight.is_inference()
            and known.data_ptr() == weight.data_ptr()
            and known.device == weight.device
            and known.shape == weight.shape
            and self._version == weight._version
        )


def _split(weight: torch.Tensor) -> torch.Tensor:
    parts, rest = [], weight.detach().float()
    for _ in range(3):
        parts.append(rest.bfloat16())
        rest = rest - parts[-1].float()
    return torch.stack(parts)
