"""The models of G §4: GAM, its ablations (G Table 4), and the paper's Transformer and Mamba, all with the same frame."""

import dataclasses

from atlasjax.nn import AttentionConfig, GAMConfig, ModelConfig, SSMConfig

GAM = ModelConfig(
    vocab_size=10_000,
    dim=512,
    num_layers=6,
    num_heads=8,
    mixer="gam",
    gam=GAMConfig(slots=512, conv_width=3),
    ffn="gelu",
    norm="layer",
    norm_eps=1e-5,
    positions="learned",
    max_positions=256,
    dropout=0.1,
    dtype="float32",
    remat=False,
)


def _fusion(name: str) -> ModelConfig:
    return dataclasses.replace(GAM, gam=dataclasses.replace(GAM.gam, fusion=name))


MODELS: dict[str, ModelConfig] = {
    "gam": GAM,
    "gam-sum": _fusion("sum"),
    "gam-global": _fusion("global"),
    "gam-local": _fusion("local"),
    "transformer": dataclasses.replace(GAM, mixer="attention", attention=AttentionConfig(rope_theta=None, bias=True)),
    # As published: Mamba layers without norm and residual around them.
    "mamba": dataclasses.replace(GAM, mixer="mamba", ffn="none", block="bare", ssm=SSMConfig(state_dim=16, expand=3)),
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
