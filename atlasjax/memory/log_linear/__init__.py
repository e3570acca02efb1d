"""Log-linear memories: a logarithmic number of memories of earlier segments. The rule is `LogLinearRule`."""

from atlasjax.memory.log_linear.rule import LogLinearRule
from atlasjax.memory.log_linear.state import LogLinearState

__all__ = ["LogLinearRule", "LogLinearState"]
