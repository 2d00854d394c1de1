"""Linear layers that read the same input, multiplied as one."""

import torch

import dsa
from dsa_layers.layers.linear import BLOCK, BlockFP8Linear, Linear

Parameters = list[tuple[torch.Tensor, torch.Tensor]]


class JointLinear:
    """y_i = x W_i^T of several layers: x is cast once, and one product has all of their columns.

    For that the weights of block-scaled FP8 layers become parts of one tensor, one after another, when a pass without
    gradients first needs them so; each layer keeps its parameters, which are views of it then. All layers but the last
    must have whole blocks of 128 rows, and all one way of scaling x. Others are multiplied one after another, and so
    are all in passes with gradients and under torch.compile; and layers of which a CUDA graph was captured before they
    were joined, as it has their addresses. The numbers are the same, bit for bit.

    It is no module and has no parameters: the layers are somebody else's, who names them at every call.
    """

    def __init__(self) -> None:
        self._layers: tuple[Linear | BlockFP8Linear, ...] = ()
        self._one_cast = self._joins = False
        self._whole: tuple[torch.Tensor, torch.Tensor] | None = None
        self._parts: list[int] = []

    def __call__(self, x: torch.Tensor, *layers: Linear | BlockFP8Linear) -> tuple[torch.Tensor, ...]:
        """x [..., I] -> y_i [..., O_i], which may be views of one tensor."""
        if layers != self._layers:
            self._take(layers)
        if not self._one_cast:
            return tuple(layer(x) for layer in layers)
        activations = layers[0].cast(x)
        whole = self._weights() if self._joins and not torch.is_grad_enabled() else None
        if whole is None:
            return tuple(layer.multiply(activations, x.dtype) for layer in layers)
        y = dsa.fp8_gemm_nt(activations, whole, x.dtype)
        return y.split([len(layer.weight) for layer in layers], -1)

    def _take(self, layers: tuple[Linear | BlockFP8Linear, ...]) -> None:
        fp8 = all(isinstance(layer, BlockFP8Linear) for layer in layers)
        self._one_cast = fp8 and len({layer.use_ue8m0 for layer in layers}) == 1
        self._joins = self._one_cast and all(len(layer.weight) % BLOCK == 0 for layer in layers[:-1])
        self._layers, self._whole, self._parts = layers, None, []

    def _weights(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """All weights and all scales; None where they are not joined and cannot be now."""
        if torch.compiler.is_compiling():
            return None
        parameters = [(layer.weight, layer.weight_scale_inv) for layer in self._layers]
        if self._parts != _addresses(parameters):
            if _capturing(parameters[0][0]):
                self._joins = False
            if not self._joins or any(tensor.is_inference() for pair in parameters for tensor in pair):
                return None
            self._join(parameters)
        return self._whole

    def _join(self, parameters: Parameters) -> None:
        # Not inference tensors, whatever the first pass is.
        with torch.inference_mode(False), torch.no_grad():
            of_kinds = list(zip(*parameters))  # all weights, all scales
            weight, scale = (torch.cat(tensors) for tensors in of_kinds)
            for tensors, whole in zip(of_kinds, (weight, scale)):
                for tensor, part in zip(tensors, whole.split([len(tensor) for tensor in tensors])):
                    tensor.data = part
        self._whole, self._parts = (weight, scale), _addresses(parameters)


def _addresses(parameters: Parameters) -> list[int]:
    """Where all of them are: a weight that was moved, or that took another's place, lies elsewhere."""
    return [tensor.data_ptr() for pair in parameters for tensor in pair]


def _capturing(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()
