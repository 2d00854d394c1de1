"""The configuration of the GLM-5 family: GLM-5, 5.1 and 5.2."""

from dataclasses import dataclass
from types import SimpleNamespace

from dsa_layers.families.declared import computed, each_of, integer, one_of, only
from dsa_layers.families.fields import Fields
from dsa_layers.families.sparse_mla.config import SparseMLAConfig

# Of index_topk_pattern.
_LETTERS = {"F": "full", "S": "shared"}


def _read_indexer_types(fields: Fields, known: SimpleNamespace) -> tuple[str, ...]:
    """Which layers have an indexer. Up to three fields say so, and they must agree."""
    layers = known.num_hidden_layers
    counts = {layers: "num_hidden_layers"}
    frequency = fields.read("index_topk_freq", integer(default=1))
    # The first `offset` layers have an indexer, and after them every frequency-th layer.
    offset = fields.read("index_skip_topk_offset", integer(minimum=0, default=2))
    given = {}
    if listed := fields.read("indexer_types", each_of("full", "shared", counts=counts)):
        given["indexer_types"] = listed
    if letters := fields.read("index_topk_pattern", each_of(*_LETTERS, counts=counts)):
        given["index_topk_pattern"] = tuple(_LETTERS[letter] for letter in letters)
    if "index_topk_freq" in fields:
        schedule = (max(i - offset + 1, 0) % frequency == 0 for i in range(layers))
        given["index_topk_freq"] = tuple("full" if full else "shared" for full in schedule)
    if not given:
        return ("full",) * layers

    (first, types), *others = given.items()
    for name, other in others:
        for layer, (kind, expected) in enumerate(zip(other, types)):
            if kind != expected:
                raise fields.error(name, f"makes layer {layer} {kind!r}", f"{expected!r}, as field '{first}' says")
    if types[0] != "full":
        raise fields.error(first, f"makes layer 0 {types[0]!r}", "'full': no layer before it has selected anything")
    return types


@dataclass(frozen=True)
class GlmMoeDsaConfig(SparseMLAConfig):
    """The indexer's rope turns channels (2i, 2i + 1). In GLM-5.2 some layers have no indexer, and of a drafter's steps
    the first one alone selects."""

    model_type = "glm_moe_dsa"
    checked = SparseMLAConfig.checked | {"moe_router_dtype": only("float32")}

    indexer_types: tuple[str, ...] = computed(_read_indexer_types)
    indexer_rope_interleave: bool = only(True)
    index_share_for_mtp_iteration: bool = one_of(True, False, default=False)

    def check(self, fields: Fields) -> None:
        super().check(fields)
        # GLM-5 and transformers mean the part that rope turns, GLM-5.2 the other one. Nothing is computed from it.
        rope, nope = self.qk_rope_head_dim, self.qk_nope_head_dim
        fields.read("head_dim", one_of(rope, nope, nope + rope, default=None))
