"""How much memory the tensors of a call would take, on the meta device."""

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class PeakBytes(TorchDispatchMode):
    """Within the block: now, the bytes of the tensors that were made in it and are there; peak, the most of them."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._alive: set[int] = set()

    def __torch_dispatch__(self, operator, types, arguments=(), options=None):
        given = {x.untyped_storage()._cdata for x in tree_leaves((arguments, options)) if isinstance(x, torch.Tensor)}
        results = operator(*arguments, **(options or {}))
        for x in tree_leaves(results):
            if isinstance(x, torch.Tensor):
                self._add(x.untyped_storage(), given)
        return results

    def _add(self, storage: torch.UntypedStorage, given: set[int]) -> None:
        key = storage._cdata
        if key in self._alive or key in given:
            return
        self._alive.add(key)
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._remove, key, storage.nbytes())

    def _remove(self, key: int, size: int) -> None:
        self._alive.discard(key)
        self.now -= size
