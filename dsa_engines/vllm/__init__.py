"""The vLLM plugin: the entry point `vllm.general_plugins` calls `register` in every process of the engine, and imports
nothing of dsa where it is off."""

from dsa_engines.switch import declined, enabled_ops

__all__ = ["register"]


def register() -> None:
    """Called by vLLM when it loads its plugins, several times and in every process. Does nothing unless DSA_ENGINE is
    "1"; then the workers of this process, and of those that are forked from it, install the plugin when they start.
    Never raises: vLLM would not start."""
    try:
        if ops := enabled_ops("vllm"):
            from dsa_engines.vllm import install

            install.hook(ops)
    except ValueError as error:
        declined("vllm", str(error))
    except Exception as error:
        declined("vllm", f"{type(error).__name__}: {error}")
