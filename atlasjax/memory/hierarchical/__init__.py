"""A global memory with large chunks and local memories with small ones, which restart. The rule is `HierarchicalRule`."""

from atlasjax.memory.hierarchical.rule import HierarchicalRule
from atlasjax.memory.hierarchical.state import HierarchicalParams, HierarchicalState

__all__ = ["HierarchicalParams", "HierarchicalRule", "HierarchicalState"]
