#!/usr/bin/env bash
# torch.optim.Muon: for a gradient of rank one, most of the update points where the gradient has nothing.
#
# Believed: Newton–Schulz moves the singular values of the update towards 1 (its docstring: US'Vᵀ with S' between 0.5 and 1.5) and
#   leaves its directions alone; a value of zero stays zero. So a rank-one gradient gives a rank-one update.
# So is: the gradient is rounded to bfloat16 first, whatever its dtype. The rounding has full rank, and each of the five steps
#   multiplies small singular values by 3.4445 (485 in all). The update has full rank, and more than half of its energy lies outside
#   the direction of the gradient. The same steps in float32 keep it inside. Rank one is the gradient
#   of a layer that was fed one token.
# Source read: torch/optim/_muon.py, `_zeropower_via_newtonschulz`.
# Seen on 2026-11-30 with torch 2.13.0 on a CPU (Python 3.11):
#
#     (32, 32): rank 25, 35% along the gradient; in float32 rank 1, 100%
#     (64, 256): rank 60, 29% along the gradient; in float32 rank 1, 100%
#     (256, 256): rank 139, 28% along the gradient; in float32 rank 1, 100%
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile "torch==2.13.0"
"$folder/venv/bin/pip" install --quiet --no-compile numpy
"$folder/venv/bin/python" - <<'EOF'
import torch
from torch.optim._muon import DEFAULT_A, DEFAULT_B, DEFAULT_C


def float32(gradient):
    """The same five steps in float32."""
    x = gradient / gradient.norm()
    for _ in range(5):
        gram = x @ x.T
        x = DEFAULT_A * x + (DEFAULT_B * gram + DEFAULT_C * gram @ gram) @ x
    return x


def described(update, u, v):
    """(rank, counting singular values over a hundredth; the share of the energy in the gradient's direction)."""
    update = update.double()
    inside = (u.double() / u.double().norm()) @ update @ (v.double() / v.double().norm())
    rank = int((torch.linalg.svdvals(update) > 0.01).sum())
    return rank, (inside**2 / (update**2).sum()).item()


found = {}
for shape in ((32, 32), (64, 256), (256, 256)):
    torch.manual_seed(0)
    u, v = torch.randn(shape[0]), torch.randn(shape[1])
    parameter = torch.nn.Parameter(torch.zeros(shape))
    optimizer = torch.optim.Muon([parameter], lr=1.0, weight_decay=0.0, momentum=0.0, nesterov=False)
    parameter.grad = torch.outer(u, v)
    optimizer.step()
    found[shape] = described(parameter.detach(), u, v)
    other = described(float32(torch.outer(u, v)), u, v)
    print(f"{shape}: rank {found[shape][0]}, {found[shape][1]:.0%} along the gradient; in float32 rank {other[0]}, {other[1]:.0%}")
    assert other[0] == 1 and other[1] > 0.999, "in float32 the update should have rank one"
assert all(rank > 10 and share < 0.5 for rank, share in found.values()), "no longer so: the update has the gradient's rank"
EOF
