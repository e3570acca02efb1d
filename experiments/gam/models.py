"""The models of G §4.2: GAM, its ablations (G §5.4, Table 3), and the paper's Transformer and Mamba, all in the same frame."""

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

# Parameter counts with a vocabulary of 10,000. They round to those in G Tables 1 and 3.
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
