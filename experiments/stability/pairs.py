"""Pairs of tiny presets that decide a direction of the papers: (better, worse) by what the paper says.

`train.py` runs them on three seeds first, and the page of evidence compares them.
"""

from typing import Any

# Attention in the layer of a memory: Transformer++ has no convolutions before its keys, and every memory has them.
BASELINE = "attention-lmm"

# Direction → its pairs, those that differ in the claim alone first.
PAIRS: dict[str, tuple[tuple[str, str], ...]] = {
    # Sliding windows of linear attention differ in the window alone; OmegaNet also in its polynomial features.
    "omega": (("swla", "retnet-lmm"), ("omeganet", "titans-no-momentum"), ("omeganet", "titans")),
    "polynomial": (("polysketch", "linear-attention"),),
    "deep": (("ttt-mlp", "ttt-linear"), ("dla", "retnet-lmm"), ("dla", "linear-attention"),
             ("titans-no-momentum", "gated-delta-rule")),
    "gated": (("atlas++", "atlas"),),
    "muon": (("atlas", "omeganet"),),
    "dot": (("dot", "deep-transformer"), ("deep-transformer", BASELINE), ("dot", BASELINE),
            ("deep-transformer", "transformer++"), ("dot", "transformer++")),
    "caching order": (("titans-grm", "titans-soup"), ("titans-soup", "titans-ssc")),
    "caching": tuple((f"titans-{name}", "titans") for name in ("grm", "soup", "ssc")),
    "log-linear": tuple((f"titans-{name}", "titans-log-linear") for name in ("grm", "soup", "ssc")),
    "residual": (("titans-residual", "titans"),),
    "gating": (("titans-grm", "titans-residual"),),
    "sampling": (("elastic-exp", "elastic-uniform"),),
    "gam": (("gam", "gam-global"), ("gam-global", "gam-sum"), ("gam-sum", "gam-local")),
    "gam and attention": (("gam", "transformer++"), ("gam", BASELINE), ("gam", "gam-transformer"), ("gam", "mamba")),
    "elastic": tuple(("elastic-exp", other) for other in ("block-attention", "memorizing", "infini", "melodi")),
    "hybrid": (("atlas-mag", "atlas"), ("atlas-mag", "atlas-mal"), ("titans-mag", "titans")),
    "language": tuple(
        (name, other)
        for other in ("titans", "transformer++", BASELINE, "gated-delta-rule", "gated-deltanet")
        for name in ("atlas", "omeganet")
    ),
    # By the perplexity of WikiText in A Table 2, where both sizes agree.
    "baselines": (("titans", "gated-deltanet"), ("gated-deltanet", "mamba2"), ("mamba2", "deltanet"),
                  ("deltanet", "transformer++"), ("transformer++", "retnet"), ("gated-deltanet-h2", "gated-deltanet"),
                  ("titans", "dla"), ("dla", "deltanet")),
    # Papers of 2025 and 2026.
    "erasing": (("gdn2", "kda"),),
    "momentum": (("momentum-deltanet", "gated-deltanet"), ("momentum-delta", "gated-delta-rule"),
                 ("titans", "titans-no-momentum")),
    "mesa": (("mesa", "deltanet"), ("mesa", "gated-deltanet")),
    "tnt": (("titans-tnt", "titans"),),
    "gated delta": (("gated-deltaproduct", "gated-deltanet"), ("comba", "gated-deltanet")),
}  # fmt: skip


def models() -> list[str]:
    """The models of the pairs, each once: those of pairs that cost least first, then as above."""
    cheap = (
        "omega", "deep", "sampling", "gam", "caching order", "caching", "residual", "dot", "muon", "polynomial", "gated",
    )  # fmt: skip
    order = dict.fromkeys((*cheap, *PAIRS))
    return list(dict.fromkeys(model for name in order for pair in PAIRS[name] for model in pair))


def default_config(name: str) -> Any:
    """The training configuration of a tiny preset, or of our own baseline with the settings of Transformer++."""
    import dataclasses

    from atlasjax.presets import model_around
    from atlasjax.train import defaults
    from experiments.language.models import attention

    if name != BASELINE:
        return defaults.default_config(f"{name}-tiny")
    return dataclasses.replace(defaults.default_config("transformer++-tiny"), model=model_around(attention))
