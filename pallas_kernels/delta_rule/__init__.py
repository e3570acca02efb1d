"""The delta rule and the gated delta rule, block-parallel."""

from pallas_kernels.delta_rule.api import delta_rule

__all__ = ["delta_rule"]
