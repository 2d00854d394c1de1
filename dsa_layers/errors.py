"""Errors about the files of a checkpoint directory. Each error class is a ValueError."""


class ConfigError(ValueError):
    """A configuration that cannot be used. The message names the file, and a field's value and accepted values."""


class CheckpointError(ValueError):
    """A checkpoint that cannot be loaded. The message names the file or the tensor."""


class TokenizerError(ValueError):
    """A tokenizer, chat template or chat format that cannot be used, or that cannot render the given messages."""
