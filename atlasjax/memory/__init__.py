"""Memories that learn at test time: pure functions on arrays and pytrees.

rule = rules.atlas(chunk_size=64, window=4)
params = memory.init_params(rule, key, num_heads=4, key_dim=64, value_dim=64)
y, state = memory.scan(rule, params, None, q, k, v, gates)
"""

from atlasjax.memory.api import AnyRule, Rule, init_params, init_state, read, reference, scan, step
from atlasjax.memory.backends import BACKENDS, Backend, register_backend
from atlasjax.memory.bounds import Bound
from atlasjax.memory.caching import CachedRule, CachedState
from atlasjax.memory.kernelized import KernelParams, KernelRule, KernelState
from atlasjax.memory.partition import Partition
from atlasjax.memory.rule import MemoryRule
from atlasjax.memory.state import Gates, MemoryParams, MemoryState
from atlasjax.memory.suggested import suggested_gates

__all__ = [
    "BACKENDS",
    "AnyRule",
    "Backend",
    "Bound",
    "CachedRule",
    "CachedState",
    "Gates",
    "KernelParams",
    "KernelRule",
    "KernelState",
    "MemoryParams",
    "MemoryRule",
    "MemoryState",
    "Partition",
    "Rule",
    "init_params",
    "init_state",
    "read",
    "reference",
    "register_backend",
    "scan",
    "step",
    "suggested_gates",
]
