"""SGLang with dsa's kernels, as a plugin that SGLang finds by the entry point `sglang.srt.plugins`.

`adapters` are SGLang's calls as functions of tensors; `hooks`, `experts` and `linear` replace SGLang's functions;
`seams` says which hook takes the place of which function; `renamed` which functions newer libraries have under other
names; `layouts` which models and caches are served; `warm_up` compiles; `plugin` puts it together.
docs/reference/engines.md says how to use it.
"""

from dsa_engines.sglang.plugin import register

__all__ = ["register"]
