#!/usr/bin/env bash
# flash-linear-attention: MesaNet's conjugate gradients do not arrive, and its output is not linear in the query.
#
# Believed: the layer's output is vᵀ-weights times (H + Λ)⁻¹ q. Conjugate gradients solve n equations in n steps up to rounding, so 30
#   steps (the default) for heads of 16 are float32-exact, more steps are never worse, and a query that is ten times as small gives
#   an output that is ten times as small.
# So is: both quotients of a step have + 1e-5 in their denominators, which are squares of the residual. Below a residual of about
#   3e-3 the steps shrink instead of converging: the error falls only slowly with the number of steps, and since 1e-5 is absolute, it
#   is ten times as large, relative to the output, for a query of a tenth of the length. Prefill (from zero) and decoding (from the
#   diagonal's solution) stop at different places. The Triton kernels have the same sums.
# Source read: fla/ops/mesa_net/naive.py; chunk_cg_solver_fwd.py and decoding_one_step.py beside it.
# Seen on 2026-11-30 with fla-core 0.6.0 and torch 2.13.0 on a CPU (Python 3.11):
#
#     queries of length 1.0,  30 steps: prefill 6e-04, decoding 6e-04, one from the other 5e-04
#     queries of length 1.0, 100 steps: prefill 3e-04, decoding 3e-04, one from the other 3e-04
#     queries of length 1.0, 300 steps: prefill 2e-04, decoding 2e-04, one from the other 1e-04
#     queries of length 0.1,  30 steps: prefill 6e-03, decoding 5e-03, one from the other 4e-03
#     queries of length 0.1, 100 steps: prefill 3e-03, decoding 3e-03, one from the other 2e-03
#     queries of length 0.1, 300 steps: prefill 2e-03, decoding 1e-03, one from the other 1e-03
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile "torch==2.13.0"
"$folder/venv/bin/pip" install --quiet --no-compile --no-deps "fla-core==0.6.0" einops numpy
"$folder/venv/bin/python" - <<'EOF'
import importlib.metadata
import importlib.util

import torch

path = importlib.metadata.distribution("fla-core").locate_file("fla/ops/mesa_net/naive.py")
spec = importlib.util.spec_from_file_location("mesa_naive", path)  # the package itself needs Triton
mesa = importlib.util.module_from_spec(spec)
spec.loader.exec_module(mesa)
LENGTH, HEADS, SIZE = 32, 2, 16


def relative(x, y):
    return ((x - y).norm() / y.norm()).item()


def errors(length_of_queries, steps):
    """Relative to the exact solution: (prefill, decoding), and decoding against prefill."""
    torch.manual_seed(0)
    q, k = (torch.nn.functional.normalize(torch.randn(1, LENGTH, HEADS, SIZE), dim=-1) for _ in "qk")
    q, v = length_of_queries * q, torch.randn(1, LENGTH, HEADS, SIZE)
    g = torch.nn.functional.logsigmoid(torch.randn(1, LENGTH, HEADS) + 4)
    beta, ridge = torch.rand(1, LENGTH, HEADS), torch.full((HEADS, SIZE), 0.25)
    exact = mesa.naive_mesa_net_exact(q, k, v, g, ridge, beta)[0]
    prefill = mesa.naive_mesa_net_CG(q, k, v, g, ridge, beta, LENGTH, steps)[0]
    keys = values = torch.zeros(1, HEADS, SIZE, SIZE)
    outs = []
    for t in range(LENGTH):
        one = (x[:, t] for x in (q, k, v, g))
        y, keys, values = mesa.naive_mesa_net_decoding_one_step(*one, ridge, beta[:, t], keys, values, steps)
        outs.append(y)
    decoded = torch.stack(outs, 1)
    return relative(prefill, exact), relative(decoded, exact), relative(decoded, prefill)


found = {}
for size in (1.0, 0.1):
    for steps in (30, 100, 300):
        found[size, steps] = errors(size, steps)
        texts = "prefill {:.0e}, decoding {:.0e}, one from the other {:.0e}".format(*found[size, steps])
        print(f"queries of length {size}, {steps:3} steps: {texts}")
assert found[1.0, 30][0] > 1e-4, "no longer so: 30 steps solve 16 equations"
assert found[1.0, 300][0] > 1e-5, "no longer so: 300 steps solve 16 equations"
assert found[0.1, 30][0] > 5 * found[1.0, 30][0], "no longer so: the output is linear in the query"
assert found[1.0, 30][2] > 1e-4, "no longer so: prefill and decoding agree"
EOF
