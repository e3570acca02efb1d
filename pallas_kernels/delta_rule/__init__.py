"""The delta rule and the gated delta rule in block-parallel form."""

from pallas_kernels.delta_rule.api import MOST_CHANNELS, delta_rule

__all__ = ["MOST_CHANNELS", "delta_rule"]
