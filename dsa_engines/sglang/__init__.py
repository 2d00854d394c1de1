"""The SGLang plugin. SGLang finds it by the entry point `sglang.srt.plugins`.

adapters                  call dsa's ops with SGLang's arguments
hooks, experts, linear    replace SGLang's functions
seams                     lists the replaced functions and their hooks
renamed                   adds old names of functions that sgl-deep-gemm 0.2.5 has renamed
layouts                   checks which models and caches dsa serves
warm_up                   compiles the kernels
plugin                    installs the hooks

docs/reference/engines.md describes how to use the plugin.
"""

from dsa_engines.sglang.plugin import register

__all__ = ["register"]
