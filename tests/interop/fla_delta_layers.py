"""Runs flash-linear-attention's layers of delta rules with random weights and saves what they compute: `python -m … FOLDER`.

A process of its own, in Triton's interpreter: see `peer_models`.
"""

import sys

import numpy as np

from tests.interop.peer_models import interpret_triton

# name → (class of fla.layers, its arguments besides hidden_size=24, num_heads=2, head_dim=8, norm_eps=1e-3)
LAYERS = {
    "gated_deltaproduct": ("GatedDeltaProduct", {"num_v_heads": 4, "expand_v": 2, "num_householder": 3}),
    "gated_deltaproduct, without a forget gate": (
        "GatedDeltaProduct",
        {"expand_v": 1, "use_forget_gate": False, "allow_neg_eigval": False},
    ),
    "comba": ("Comba", {"expand_v": 2}),
    "pgdn": ("PrecondGatedDeltaNet", {"num_v_heads": 4, "expand_v": 1}),
    "pkda": ("PrecondKDA", {"num_v_heads": 4, "expand_v": 2}),
}


def main(folder: str) -> None:
    interpret_triton()
    import fla.layers
    import torch

    for name, (kind, changes) in LAYERS.items():
        torch.manual_seed(0)
        given = {"hidden_size": 24, "num_heads": 2, "head_dim": 8, "norm_eps": 1e-3, "layer_idx": 0, **changes}
        layer = getattr(fla.layers, kind)(**given).eval()
        with torch.no_grad():
            for parameter in layer.parameters():  # zeros and ones hide mistakes
                parameter.add_(0.2 * torch.randn_like(parameter))
            x = torch.randn(1, 7, 24)
            y = layer(x)[0]
        np.savez(
            f"{folder}/{name}.npz", x=x, y=y, **{f"weights/{tensor}": w for tensor, w in layer.state_dict().items()}
        )


if __name__ == "__main__":
    main(sys.argv[1])
