"""The tiny GLM-5.2: layers with an indexer and without one, after a dense layer and after sparse ones."""

from dsa_layers.families.family import TinyFields
from dsa_layers.families.sparse_mla.tiny import SPARSE_MLA_FIELDS

TINY = TinyFields(
    "glm_5_2_config.json",
    {
        **SPARSE_MLA_FIELDS,
        "eos_token_id": [1],
        "index_skip_topk_offset": 2,
        "index_topk_freq": 2,
        "indexer_types": ["full", "full", "shared", "full", "shared"],
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse", "sparse"],
        "num_hidden_layers": 5,
        "pad_token_id": 1,
        # The published file is the BF16 release's; in the FP8 release scales are no powers of two.
        "quantization_config": {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "quant_method": "fp8",
            "weight_block_size": [128, 128],
        },
    },
)
