"""Memories that learn at test time: pure functions on arrays and pytrees.

rule = rules.atlas(chunk_size=64, window=4)
params = memory.init_params(rule, key, num_heads=4, key_dim=64, value_dim=64)
y, state = memory.scan(rule, params, None, q, k, v, gates)
"""

import sys

from atlasjax.memory.api import init_params, init_state, read, reference, scan, soup, step
from atlasjax.memory.axes import features, objectives, optimizers, retention, structures
from atlasjax.memory.backends import BACKENDS, Backend, register_backend
from atlasjax.memory.bounds import Bound
from atlasjax.memory.caching import CachedRule, CachedState
from atlasjax.memory.fast_weights.rule import MemoryRule
from atlasjax.memory.fast_weights.state import MemoryParams, MemoryState
from atlasjax.memory.gates import Gates
from atlasjax.memory.hierarchical import HierarchicalParams, HierarchicalRule, HierarchicalState
from atlasjax.memory.large_chunk import LargeChunkRule, LargeChunkState
from atlasjax.memory.log_linear import LogLinearRule, LogLinearState
from atlasjax.memory.mesa import MesaParams, MesaRule, MesaState
from atlasjax.memory.normalized import NormalizedRule
from atlasjax.memory.partition import Partition
from atlasjax.memory.rule import Rule
from atlasjax.memory.saved import load, save
from atlasjax.memory.softmax import SoftmaxParams, SoftmaxRule, SoftmaxState
from atlasjax.memory.suggested import suggested_gates

# The parts of a rule are public as `atlasjax.memory.structures` and so on, wherever their files are.
for _part in (features, objectives, optimizers, retention, structures):
    sys.modules[_part.__name__.replace(".axes.", ".", 1)] = _part

__all__ = [
    "BACKENDS",
    "Backend",
    "Bound",
    "CachedRule",
    "CachedState",
    "Gates",
    "HierarchicalParams",
    "HierarchicalRule",
    "HierarchicalState",
    "LargeChunkRule",
    "LargeChunkState",
    "LogLinearRule",
    "LogLinearState",
    "MemoryParams",
    "MemoryRule",
    "MemoryState",
    "MesaParams",
    "MesaRule",
    "MesaState",
    "NormalizedRule",
    "Partition",
    "Rule",
    "SoftmaxParams",
    "SoftmaxRule",
    "SoftmaxState",
    "features",
    "init_params",
    "init_state",
    "load",
    "objectives",
    "optimizers",
    "read",
    "reference",
    "register_backend",
    "retention",
    "save",
    "scan",
    "soup",
    "step",
    "structures",
    "suggested_gates",
]
