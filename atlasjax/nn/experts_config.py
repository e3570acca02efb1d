"""The experts of a feed-forward network, in a config."""

import dataclasses
from typing import Literal

from atlasjax import check


@dataclasses.dataclass(frozen=True)
class ExpertsConfig:
    """A mixture of experts (Shazeer et al. 2017) as the feed-forward network of layers whose `ffn` is "experts". Every token goes
    to all the experts that it chooses: none is dropped.

    Attributes:
      number: number of experts, ≥ 1.
      per_token: how many of them each token goes to, at most those of the top groups.
      width: hidden width of an expert. None: the model's `mlp_dim`.
      network: the form of the experts and of the shared one: "swiglu", or "relu2", two projections with squared ReLU.
      scores: what the router makes of its logits: "softmax" over all experts (Qwen, Granite), or "sigmoid" of each (DeepSeek-V3).
      normalize: whether the scores of a token's experts are divided by their sum.
      scale: factor of these scores, > 0.
      correction_bias: whether a bias, which has no gradient, is added to the scores by which experts are chosen, and not to those
        that weigh their outputs (DeepSeek-V3).
      bias_update: after each training step the bias grows by this where an expert had fewer tokens than the mean, and shrinks by it
        where it had more (arXiv:2408.15664, published: 0.001). 0: the bias stays as it is.
      groups, top_groups: the experts are in so many groups of equal size, and a token chooses among those of its top groups, which
        have the largest sums of their two best scores (DeepSeek-V3).
      shared_width: hidden width of a network that every token goes to besides. None: none.
      shared_gate: whether its output is multiplied by the sigmoid of a learned projection to a scalar, as in Qwen.
      balance_loss: factor of the balance loss (`experts.balance`), which is added to the training loss. Qwen: 0.001.

    Raises:
      ValueError: a field is out of range, or fields conflict.
    """

    number: int = 8
    per_token: int = 2
    width: int | None = None
    network: Literal["swiglu", "relu2"] = "swiglu"
    scores: Literal["softmax", "sigmoid"] = "softmax"
    normalize: bool = True
    scale: float = 1.0
    correction_bias: bool = False
    bias_update: float = 0.0
    groups: int = 1
    top_groups: int = 1
    shared_width: int | None = None
    shared_gate: bool = False
    balance_loss: float = 0.0

    def __post_init__(self) -> None:
        optional = ("width", "shared_width")
        check.integers(self, dict.fromkeys(("number", "per_token", "groups", "top_groups", *optional), 1), optional)
        check.declared(self)
        check.number("ExpertsConfig", "scale", self.scale, above=0)
        for name in ("bias_update", "balance_loss"):
            check.number("ExpertsConfig", name, getattr(self, name), least=0)
        in_group = self.number // self.groups
        for why, is_refused in (
            (f"groups={self.groups} does not divide number={self.number}", self.number % self.groups),
            (f"top_groups={self.top_groups} is more than groups={self.groups}", self.top_groups > self.groups),
            (
                f"groups={self.groups} leave one expert in each; a group has at least two",
                self.groups > 1 and in_group < 2,
            ),
            (
                f"per_token={self.per_token} is more than the {self.top_groups * in_group} experts that a token can choose from",
                self.per_token > self.top_groups * in_group,
            ),
            ("shared_gate needs shared_width", self.shared_gate and self.shared_width is None),
            ("bias_update needs correction_bias", self.bias_update > 0 and not self.correction_bias),
        ):
            if is_refused:
                raise ValueError(f"ExpertsConfig: {why}.")
