#!/usr/bin/env bash
# flash-linear-attention: the TTT-Linear reference scales the caller's own queries, but only if no token had to be padded.
#
# Believed: a reference function leaves its arguments alone; a test may call it and then the fast function with the same tensors.
# So is: for float32 queries and a length that mini_batch_size divides, `.to(torch.float32)` and the transposition are views of the
#   caller's tensor, and `q *= scale` writes into it. A second call with the same tensors gives another answer. With one token more
#   the padding makes a copy, and with bfloat16 the conversion does: nothing is changed. So a test of odd lengths and a test of
#   even ones see two different functions.
# Source read: fla/ops/ttt/naive.py, `chunk_ttt_linear_ref` and `ttt_linear`.
# Seen on 2026-11-30 with fla-core 0.6.0 and torch 2.13.0 on a CPU (Python 3.11):
#
#     length of the queries after a call / before it; difference of a second call with the same tensors
#     32 tokens, torch.float32 : 0.25; 0.59
#     33 tokens, torch.float32 : 1.00; 0.00
#     32 tokens, torch.bfloat16: 1.00; 0.00
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

path = importlib.metadata.distribution("fla-core").locate_file("fla/ops/ttt/naive.py")
spec = importlib.util.spec_from_file_location("ttt_naive", path)  # the package itself needs Triton
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)


def twice(length, dtype):
    """(queries after the first call / before it, relative difference of a second call with the same tensors)."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, length, 2, 16).to(dtype) for _ in "qkv")
    scale, bias, eta = torch.ones(2, 16), torch.zeros(2, 16), torch.full((1, length, 2, 1), 1e-3).to(dtype)
    before = q.clone()
    first = module.chunk_ttt_linear_ref(q, k, v, scale, bias, eta)[0]
    ratio = (q.norm() / before.norm()).item()
    second = module.chunk_ttt_linear_ref(q, k, v, scale, bias, eta)[0]
    return ratio, ((second - first).norm() / first.norm()).item()


print("length of the queries after a call / before it; difference of a second call with the same tensors")
found = {}
for length, dtype in ((32, torch.float32), (33, torch.float32), (32, torch.bfloat16)):
    found[length, dtype] = twice(length, dtype)
    print(f"{length} tokens, {str(dtype):14}: {found[length, dtype][0]:.2f}; {found[length, dtype][1]:.2f}")
changed = found.pop((32, torch.float32))
assert all(ratio == 1 and second == 0 for ratio, second in found.values()), "copies should leave the queries alone"
assert changed[0] < 0.5 and changed[1] > 0.1, "no longer so: the queries are left alone"
EOF
