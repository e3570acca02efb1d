"""The models of G §4: GAM, its ablations (G Table 4), and the paper's Transformer and Mamba, all with the same frame."""

import dataclasses

from atlasjax.nn import ModelConfig
from atlasjax.presets import get_preset

MODELS: dict[str, ModelConfig] = {
    name: dataclasses.replace(get_preset(f"{preset}-22m"), remat=False)
    for name, preset in {
        "gam": "gam",
        "gam-sum": "gam-sum",
        "gam-global": "gam-global",
        "gam-local": "gam-local",
        "transformer": "gam-transformer",
        "mamba": "gam-mamba",
    }.items()
}

# The counts that the paper gives or that follow from it, with a vocabulary of 10,000.
PARAMETERS = {
    "gam": 22_599_680,
    "gam-sum": 19_447_808,
    "gam-global": 19_435_520,
    "gam-local": 17_874_944,
    "transformer": 24_166_400,
    "mamba": 20_504_576,
}


def small(config: ModelConfig) -> ModelConfig:
    """The same architecture at a width of 128 and 4 layers, for a CPU."""
    return dataclasses.replace(config, dim=128, num_layers=4, num_heads=4)
