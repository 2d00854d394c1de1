"""The vLLM plugin: the entry point `vllm.general_plugins` calls `register` in every process of the engine."""

from dsa_engines.vllm.install import register

__all__ = ["register"]
