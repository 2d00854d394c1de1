"""Which CUDA graph a call is captured into."""

import torch


def capture_number(x: torch.Tensor) -> int | None:
    """Of the graph that the current stream, on which x is used, is being captured into, as the CUDA runtime counts
    captures; None: into none."""
    if not x.is_cuda or not torch.cuda.is_current_stream_capturing():
        return None
    from cuda.bindings import runtime  # comes with the kernels' DSL

    error, _, number, *_ = runtime.cudaStreamGetCaptureInfo(torch.cuda.current_stream().cuda_stream)
    if error != runtime.cudaError_t.cudaSuccess:
        raise RuntimeError(f"CUDA does not tell which graph is captured: {error.name}")
    return int(number)
