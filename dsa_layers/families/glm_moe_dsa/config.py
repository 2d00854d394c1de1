"""The configuration of the GLM-5 family: GLM-5, 5.1 and 5.2."""

from dsa_layers.families.fields import Fields
from dsa_layers.families.parts import read_layers
from dsa_layers.families.sparse_mla.config import SparseMLAConfig, read_sparse_mla

# Of index_topk_pattern.
_LETTERS = {"F": "full", "S": "shared"}


class GlmMoeDsaConfig(SparseMLAConfig):
    """The indexer's rope turns channels (2i, 2i + 1). In GLM-5.2 some layers have no indexer, and of a drafter's steps
    the first one alone selects."""

    model_type = "glm_moe_dsa"


def read_glm_moe_dsa(fields: Fields, generation: Fields | None) -> GlmMoeDsaConfig:
    rope, nope = fields.integer("qk_rope_head_dim"), fields.integer("qk_nope_head_dim")
    # GLM-5 and transformers mean the part that rope turns, GLM-5.2 the other one. Nothing is computed from it.
    fields.one_of("head_dim", (rope, nope, nope + rope), default=rope)
    fields.one_of("moe_router_dtype", ("float32",), default="float32")
    return read_sparse_mla(
        GlmMoeDsaConfig,
        fields,
        generation,
        indexer_types=_read_indexer_types(fields),
        indexer_rope_interleave=fields.one_of("indexer_rope_interleave", (True,), default=True),
        index_share_for_mtp_iteration=fields.one_of("index_share_for_mtp_iteration", (True, False), default=False),
    )


def _read_indexer_types(fields: Fields) -> tuple[str, ...]:
    """Which layers have an indexer. Three fields can say it, and those that are given must agree."""
    layers = read_layers(fields)
    frequency = fields.integer("index_topk_freq", default=1)
    # The first `offset` layers have one, and every frequency-th counted from the last of them.
    offset = fields.integer("index_skip_topk_offset", minimum=0, default=2)
    said = {}
    if listed := fields.each_of("indexer_types", ("full", "shared"), layers):
        said["indexer_types"] = listed
    if letters := fields.each_of("index_topk_pattern", tuple(_LETTERS), layers):
        said["index_topk_pattern"] = tuple(_LETTERS[letter] for letter in letters)
    if "index_topk_freq" in fields:
        schedule = (max(i - offset + 1, 0) % frequency == 0 for i in range(layers))
        said["index_topk_freq"] = tuple("full" if full else "shared" for full in schedule)
    if not said:
        return ("full",) * layers

    (first, types), *others = said.items()
    for name, other in others:
        if other != types:
            layer = next(i for i in range(layers) if other[i] != types[i])
            raise fields.error(
                name, f"makes layer {layer} {other[layer]!r}", f"{types[layer]!r}, as field '{first}' says"
            )
    if types[0] != "full":
        raise fields.error(first, f"makes layer 0 {types[0]!r}", "'full': no layer before it has selected anything")
    return types
