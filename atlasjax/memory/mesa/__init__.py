"""Ridge regression over all tokens, solved at every token (MesaNet). The rule is `MesaRule`."""

from atlasjax.memory.mesa.rule import MesaRule
from atlasjax.memory.mesa.state import MesaParams, MesaState

__all__ = ["MesaParams", "MesaRule", "MesaState"]
