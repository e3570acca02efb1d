#!/usr/bin/env bash
# flash-linear-attention: Comba's two slow references are different functions.
#
# Believed: naive_recurrent_comba is the definition and naive_chunk_comba its chunk form, as for the package's other operations, and
#   Gated DeltaNet's order (decay, then the error) holds for Comba too.
# So is: the recurrent reference takes the error at the decayed memory, S <- a S + b (v - a S p) kT; the chunk reference, and the
#   Triton kernels (fused_recurrent: the subtraction comes before the multiplication by exp(g)), take it at the memory before the
#   decay, S <- a S + b (v - S p) kT. The latter is the paper's transition a I - b p kT. They agree only without decay. A test
#   against the recurrent reference, or a port of it, gives another model than the layer computes. The order of the arguments beta
#   and g is exchanged too.
# Source read: fla/ops/comba/naive.py, fla/ops/comba/fused_recurrent.py.
# Seen on 2026-12-01 with fla-core 0.6.0 and torch 2.13.0 on a CPU (Python 3.11):
#
#     recurrent reference: decay first 1e-07, error first 1e-01
#     chunk reference:     decay first 1e-01, error first 2e-07
#     without decay, one from the other: 2e-07
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

path = importlib.metadata.distribution("fla-core").locate_file("fla/ops/comba/naive.py")
spec = importlib.util.spec_from_file_location("comba_naive", path)  # the package itself needs Triton
comba = importlib.util.module_from_spec(spec)
spec.loader.exec_module(comba)
LENGTH, HEADS, SIZE = 48, 2, 8
torch.manual_seed(0)
draw = lambda *more: torch.randn(1, LENGTH, HEADS, *more)
q, k = (torch.nn.functional.normalize(draw(SIZE), dim=-1) for _ in "qk")
v, p, beta = draw(SIZE), 0.7 * k, torch.rand(1, LENGTH, HEADS)
g = torch.nn.functional.logsigmoid(draw() + 1)


def relative(x, y):
    return ((x - y).abs().max() / y.abs().max()).item()


def written_out(decay_first):
    """The recurrence token by token, with the memory as [value, key]."""
    memory, outs = torch.zeros(1, HEADS, SIZE, SIZE), []
    for t in range(LENGTH):
        decayed = memory * g[:, t].exp()[..., None, None]
        read = torch.einsum("bhvk,bhk->bhv", decayed if decay_first else memory, p[:, t])
        memory = decayed + torch.einsum("bh,bhv,bhk->bhvk", beta[:, t], v[:, t] - read, k[:, t])
        outs.append(torch.einsum("bhvk,bhk->bhv", memory, q[:, t]) * SIZE**-0.5)
    return torch.stack(outs, 1)


recurrent = lambda g: comba.naive_recurrent_comba(q, k, v, p, beta, g)[0]
chunk = lambda g: comba.naive_chunk_comba(q, k, v, p, g, beta, chunk_size=16)[0]
found = {
    name: [relative(run(g), written_out(first)) for first in (True, False)]
    for name, run in (("recurrent", recurrent), ("chunk", chunk))
}
same = relative(chunk(0 * g), recurrent(0 * g))
print("recurrent reference: decay first {:.0e}, error first {:.0e}".format(*found["recurrent"]))
print("chunk reference:     decay first {:.0e}, error first {:.0e}".format(*found["chunk"]))
print(f"without decay, one from the other: {same:.0e}")
assert found["recurrent"][0] < 1e-5 < 1e-2 < found["recurrent"][1]
assert found["chunk"][1] < 1e-5 < 1e-2 < found["chunk"][0]
assert same < 1e-5
EOF
