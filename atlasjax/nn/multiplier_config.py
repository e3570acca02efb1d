"""The constants by which a model multiplies its activations."""

import dataclasses

from atlasjax import check


@dataclasses.dataclass(frozen=True)
class MultiplierConfig:
    """Constants, not learned, that are chosen for a model's width so that activations keep their size: the multipliers of μP (Yang
    et al. 2022), as Granite 4.0 and Falcon-H1 have them. All are > 0, and 1 changes nothing.

    Attributes:
      embedding: of the embeddings.
      residual: of what mixer and feed-forward network add to the residual stream.
      logits: of the logits.
      mlp_gate: of the gate's input in "swiglu", before SiLU.
      mlp_out: of the output of "swiglu".
      attention_out: of the output of "attention" and "swa". The factor of their scores is `attention.scale`.
      ssm: of the projections z, x, B, C and Δ of "mamba2", before the convolution, and for Δ before its bias.
      ssm_out: of the output of "mamba2".

    Raises:
      ValueError: a field is out of range.
    """

    embedding: float = 1.0
    residual: float = 1.0
    logits: float = 1.0
    mlp_gate: float = 1.0
    mlp_out: float = 1.0
    attention_out: float = 1.0
    ssm: tuple[float, ...] = (1.0, 1.0, 1.0, 1.0, 1.0)
    ssm_out: float = 1.0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name != "ssm":
                check.number("MultiplierConfig", field.name, value, above=0)
        if not isinstance(self.ssm, tuple) or len(self.ssm) != 5:
            raise ValueError(f"MultiplierConfig: ssm={self.ssm!r} must be five numbers > 0, for z, x, B, C and Δ.")
        for value in self.ssm:
            check.number("MultiplierConfig", "each one of ssm", value, above=0)
