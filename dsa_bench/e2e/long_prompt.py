"""One long prompt, computed pass by pass, and what passes take: the GPU's time, and memory."""

from typing import Any

import torch

from dsa_layers.batch.prefill import Chunk, prefill_batch
from dsa_layers.families.model import Model


class LongPrompt:
    """A prompt of so many tokens with a cache of its own. Each pass computes `chunk` of them, the last one the rest."""

    def __init__(self, model: Model, tokens: int, chunk: int) -> None:
        self._model, self.tokens, self.chunk = model, tokens, chunk
        self._device = next(model.parameters()).device
        self._pages = range(-(-tokens // model.page_size))
        self.cache = model.make_cache(len(self._pages), device=self._device, state_slots=1)

    @torch.inference_mode()
    def compute(self, begin: int) -> torch.Tensor:
        """The pass over the tokens from `begin` on, behind those before it. Logits of its last token."""
        end = min(begin + self.chunk, self.tokens)
        batch = prefill_batch([Chunk(end - begin, begin, self._pages, 0)], self.cache.page_size, self._device)
        tokens = torch.arange(begin, end, device=self._device) % self._model.config.vocab_size
        return self._model(tokens, batch, self.cache)


class Watch:
    """The GPU's clock, and the memory that tensors take there."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def mark(self) -> Any:
        """A moment on the GPU's clock: when all that was launched before is done."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def ms(self, begin: Any, end: Any) -> float:
        """Milliseconds between two marks, once the GPU has passed the second."""
        end.synchronize()
        return begin.elapsed_time(end)

    def held(self) -> int:
        """Bytes that tensors take now."""
        return torch.cuda.memory_allocated(self.device)

    def free(self) -> int:
        """Bytes that the GPU has left."""
        return torch.cuda.mem_get_info(self.device)[0]

    def forget_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.device)

    def peak(self) -> int:
        """Bytes that tensors took at most since `forget_peak`."""
        return torch.cuda.max_memory_allocated(self.device)
