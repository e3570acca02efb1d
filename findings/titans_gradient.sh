#!/usr/bin/env bash
# flash-linear-attention: the step of the Titans reference is not the gradient of its loss, and about head_dim times as long.
#
# Believed: `fla/ops/titans/naive.py` is the slow definition to test a fast one against. Its docstring says
#   S_t = eta_t S_{t-1} - theta_t ∇l(M_{t-1}; x_t), with l(M; x) = ‖LayerNorm(k M) - (v - k)‖².
# So is: in the backward pass of the LayerNorm a pair of brackets is missing, `D * grad - grad.sum(…) / (rstd * D)` in place of
#   `(D * grad - grad.sum(…)) / (rstd * D)`; `rstd` there is the deviation, not its reciprocal. One step from a state M differs from
#   autograd's gradient of that loss in direction and is too long by about the size of a head. The reference of TTT next to it
#   (fla/ops/ttt/naive.py) has the brackets. The chunked form of Titans repeats the mistake, so the two agree with each other.
# Source read: fla/ops/titans/naive.py (`titans_linear`, `chunk_titans_linear`), fla/ops/ttt/naive.py.
# Seen on 2026-11-30 with fla-core 0.6.0 and torch 2.13.0 on a CPU (Python 3.11):
#
#     heads of  16: mean cosine 0.77, mean length 19 times the gradient's
#     heads of  64: mean cosine 0.79, mean length 82 times the gradient's
#     heads of 128: mean cosine 0.82, mean length 155 times the gradient's
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile "torch==2.13.0"
"$folder/venv/bin/pip" install --quiet --no-compile --no-deps "fla-core==0.6.0" einops numpy
"$folder/venv/bin/python" - <<'EOF'
import importlib.metadata
import importlib.util
import sys
import types

import torch

package = importlib.metadata.distribution("fla-core")


def load(path):
    """A file of the package without the package, which needs Triton."""
    name = path.removesuffix(".py").replace("/", ".")
    for part in ("fla", "fla.ops", "fla.ops.titans"):
        sys.modules.setdefault(part, types.ModuleType(part))
    spec = importlib.util.spec_from_file_location(name, package.locate_file(path))
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


load("fla/ops/titans/log_impl.py")
titans_linear = load("fla/ops/titans/naive.py").titans_linear
EPS = 1e-6


def compare(size, seed):
    """(cosine, ratio of lengths) of one step with θ = 1, α = η = 0 and the gradient by autograd."""
    torch.manual_seed(seed)
    k, v, memory = torch.randn(1, 1, 1, size), torch.randn(1, 1, 1, size), torch.randn(1, 1, size, size) / size**0.5
    scale, bias = 1 + 0.1 * torch.randn(1, size), 0.1 * torch.randn(1, size)
    one, zero = torch.ones(1, 1, 1, 1), torch.zeros(1, 1, 1, 1)
    _, after = titans_linear(k, k, v, scale, bias, one, zero, zero, EPS, 1, memory, True)
    start = memory.clone().requires_grad_()
    read = torch.nn.functional.layer_norm(k @ start, (size,), scale[0], bias[0], EPS)
    gradient = torch.autograd.grad(((read - (v - k)) ** 2).sum(), start)[0].flatten()
    step = (memory - after).flatten()
    return torch.cosine_similarity(step, gradient, dim=0).item(), (step.norm() / gradient.norm()).item()


found = {}
for size in (16, 64, 128):
    cosines, ratios = zip(*(compare(size, seed) for seed in range(20)))
    found[size] = sum(cosines) / 20, sum(ratios) / 20
    print(f"heads of {size:3}: mean cosine {found[size][0]:.2f}, mean length {found[size][1]:.0f} times the gradient's")
assert all(cosine < 0.95 and ratio > size / 3 for size, (cosine, ratio) in found.items()), "no longer so"
EOF
