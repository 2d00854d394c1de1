"""How a checkpoint directory is refused. Each error is a ValueError."""


class ConfigError(ValueError):
    """A configuration that cannot be used. The message names the file, the field, its value and what is accepted."""


class CheckpointError(ValueError):
    """A checkpoint that cannot be loaded. Names files and tensors, what was expected and what was found."""


class TokenizerError(ValueError):
    """A tokenizer, chat template or chat format that cannot be used, or not for these messages. Names the file or
    argument, what it holds and what is accepted."""
