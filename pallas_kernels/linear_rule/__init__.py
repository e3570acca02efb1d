"""Linear and delta rules of a matrix memory with a decay for each channel of the key (GLA, RWKV-7)."""

from pallas_kernels.linear_rule.api import IMPLEMENTATIONS, MOST_CHANNELS, linear_rule
from pallas_kernels.linear_rule.gpu import memory_pass

__all__ = ["IMPLEMENTATIONS", "MOST_CHANNELS", "linear_rule", "memory_pass"]
