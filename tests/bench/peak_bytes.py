"""Count the bytes that a call's tensors would take, by running the call on the meta device."""

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class PeakBytes(TorchDispatchMode):
    """now: bytes of the tensors that were made within the block and still exist. peak: the maximum of `now`."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._alive: set[int] = set()

    def __torch_dispatch__(self, operator, types, arguments=(), options=None):
        inputs = {x.untyped_storage()._cdata for x in tree_leaves((arguments, options)) if isinstance(x, torch.Tensor)}
        results = operator(*arguments, **(options or {}))
        for x in tree_leaves(results):
            if isinstance(x, torch.Tensor):
                self._add(x.untyped_storage(), inputs)
        return results

    def _add(self, storage: torch.UntypedStorage, inputs: set[int]) -> None:
        key = storage._cdata
        if key in self._alive or key in inputs:
            return
        self._alive.add(key)
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._remove, key, storage.nbytes())

    def _remove(self, key: int, size: int) -> None:
        self._alive.discard(key)
        self.now -= size
