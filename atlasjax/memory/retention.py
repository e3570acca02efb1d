"""How the memory forgets: M_t = α_t M_{t−1} + S_t, decay towards zero."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Full:
    """α = 1: nothing decays, and there is no gate."""


@dataclasses.dataclass(frozen=True)
class Scalar:
    """One α_t ∈ [0, 1] per token and head."""


@dataclasses.dataclass(frozen=True)
class Channel:
    """α_t ∈ [0, 1]^D, one for each feature channel: M_t = M_{t−1} Diag(α_t) + S_t. Matrix memories only (GLA)."""


Retention = Full | Scalar | Channel
