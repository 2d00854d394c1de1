"""Safetensors checkpoints: what a directory holds, and loading it into a model that was built on the meta device.

Everything that can be wrong is looked for in the files' headers before the first weight is read: a checkpoint is
hundreds of gigabytes, and minutes into the load is too late to learn that a file is cut short. A header may be written
by anybody, so it is checked before anything is made as large as it says. The model gets its tensors in one step at the
end, so a load that fails leaves it as it was.
"""

from dsa_layers.checkpoint.directory import INDEX_NAME, SINGLE_NAME, Checkpoint, StoredNames
from dsa_layers.checkpoint.header import TensorInfo
from dsa_layers.checkpoint.plan import SCALE_SUFFIX, Index
from dsa_layers.checkpoint.weights import load_weights
from dsa_layers.errors import CheckpointError

__all__ = [
    "INDEX_NAME",
    "SCALE_SUFFIX",
    "SINGLE_NAME",
    "Checkpoint",
    "CheckpointError",
    "Index",
    "StoredNames",
    "TensorInfo",
    "load_weights",
]
