"""What is added to the trained model: the arms of the experiment."""

import dataclasses
from collections.abc import Callable

from atlasjax.nn import AttentionConfig, BranchConfig, CachingConfig, MemoryConfig, ModelConfig

SEGMENT = 64  # tokens of a window, and of a segment whose memory is cached: a quarter of a training sequence


@dataclasses.dataclass(frozen=True)
class Arm:
    """A model that trains on.

    Attributes:
      told: what is added, for people.
      options: of `atlasjax train --init-from RUN`.
      added: the config of the trained model → with what is added.
      color: of its lines.
    """

    told: str
    options: str
    added: Callable[[ModelConfig], ModelConfig]
    color: str


def _beside(branch: BranchConfig) -> Callable[[ModelConfig], ModelConfig]:
    return lambda model: dataclasses.replace(model, branch=branch)


def _window(size: int) -> Callable[[ModelConfig], ModelConfig]:
    return _beside(BranchConfig("swa", attention=AttentionConfig(size)))


CONTROL, PARAMETERS = "nothing", "token"
ARMS = {
    CONTROL: Arm("nothing: the control", "", lambda model: model, "black"),
    # As many parameters as with a window, and nothing of the past in them.
    PARAMETERS: Arm("parameters alone: a window of one token", "--add-window 1", _window(1), "tab:gray"),
    "window": Arm(f"a window of {SEGMENT} tokens", f"--add-window {SEGMENT}", _window(SEGMENT), "tab:red"),
    "grm": Arm(
        f"a cache of Mamba-2's states (GRM, segments of {SEGMENT})", f"--add-caching grm --segment-size {SEGMENT}",
        lambda model: dataclasses.replace(model, caching=CachingConfig.added("grm", SEGMENT)), "tab:green",
    ),
    "titans": Arm(
        "a deep memory (Titans)", "--add-memory titans", _beside(BranchConfig("memory", memory=MemoryConfig("titans"))),
        "tab:blue",
    ),
}  # fmt: skip
IMPORTED = "imported"  # the model before it trains on, tested as the arms are
