"""A stand-in for CUDA graphs on a CPU: sizes are rounded up, tensors are reused, and a replay runs the pass again."""

from torch.utils._pytree import tree_leaves

from dsa_layers.generation.steps import CapturedStep


class Replay:
    """A stand-in for the CUDA graph of `run`. `replay` writes new results to the tensors of the first results."""

    def __init__(self, run):
        self.run, self.results = run, run()

    def replay(self):
        for old, new in zip(tree_leaves(self.results), tree_leaves(self.run()), strict=True):
            old.copy_(new)


def capture_passes(monkeypatch):
    """Capture passes on a CPU too. Return a list to which each capture appends (class of the step, inputs)."""
    captured, make = [], CapturedStep.__init__

    def init(self, *arguments, **options):
        make(self, *arguments, **options)
        self.captures = True

    def capture(self, inputs):
        captured.append((type(self), inputs))
        replay = Replay(lambda: self._run(inputs))
        return replay, replay.results

    monkeypatch.setattr(CapturedStep, "__init__", init)
    monkeypatch.setattr(CapturedStep, "_capture", capture)
    return captured
