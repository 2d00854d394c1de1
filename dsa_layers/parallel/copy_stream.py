"""A stream of a GPU beside the one in which a model is computed: copies, and flags behind them.

They are the driver's own calls. Of torch's each takes the host several times as long, and a prompt's pass has thousands
of launches beside them, which would wait.
"""

from typing import Any

import torch


class CopyStream:
    """`begin`, what is to be copied, then `end`; and when the current stream needs it, `join`."""

    def __init__(self, device: torch.device) -> None:
        from cuda.bindings import driver  # comes with the kernels' DSL, which is for Linux

        self._driver, self._device = driver, device
        self._torch_stream = torch.cuda.Stream(device)
        self._stream = driver.CUstream(self._torch_stream.cuda_stream)
        flags = driver.CUevent_flags.CU_EVENT_DISABLE_TIMING.value
        with torch.cuda.device(device):
            self._begun, self._ended = (self._call("cuEventCreate", flags) for _ in range(2))

    def begin(self) -> None:
        """What follows waits for what the current stream has to do."""
        self._call("cuEventRecord", self._begun, self._current())
        self._call("cuStreamWaitEvent", self._stream, self._begun, 0)

    def copy(self, x: torch.Tensor, address: int) -> None:
        """The bytes of x, which is contiguous and is to stay until `join`, to an address of any GPU."""
        if x.nbytes:
            self._call("cuMemcpyAsync", address, x.data_ptr(), x.nbytes, self._stream)

    def set_flag(self, address: int, value: int) -> None:
        """The int32 at an address of any GPU gets this value when the copies have arrived: by the stream itself, for
        which no multiprocessor has to be free."""
        self._call("cuStreamWriteValue32", self._stream, address, value, 0)

    def end(self) -> None:
        self._call("cuEventRecord", self._ended, self._stream)

    def join(self) -> None:
        """The current stream waits for what there was to do up to the end."""
        self._call("cuStreamWaitEvent", self._current(), self._ended, 0)

    def _current(self) -> int:
        # 1: the default stream of all threads, which 0 need not be.
        return torch.cuda.current_stream(self._device).cuda_stream or 1

    def _call(self, name: str, *arguments: Any) -> Any:
        error, *results = getattr(self._driver, name)(*arguments)
        if error != self._driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"{name}: the CUDA driver answers {error.name}")
        return results[0] if results else None
