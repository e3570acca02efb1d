#!/usr/bin/env bash
# flash-linear-attention: Gated DeltaNet-2's memory grows without limit for unit keys and gates within their ranges, unless it decays.
#
# Believed: with keys of length 1 and erasing rates b in [0, 1], the transition I - (b * k) kT has eigenvalues in [0, 1], as in the
#   delta rule, so a token can only shrink what is stored, and without values (v = 0) a memory never grows.
# So is: b * k and k are not parallel, so the transition is no projection, and its norm may exceed 1. One product of two such
#   transitions, each repeated, multiplies the memory by (1 - c^2)/c^2, for any c: keys (c, -s) with b = (1, 0) for some tokens, then
#   (s, -c) with b = (0, 1), with s^2 = 1 - c^2. Nothing is written. KDA and Gated DeltaNet (one b for all channels) cannot do this.
#   A decay of 0.95 stops it at c = 0.3. The chunk form gives the same.
# Source read: fla/ops/gdn2/naive.py, fla/layers/gdn2.py (sigmoids for b, l2 norm of keys).
# Seen on 2026-12-01 with fla-core 0.6.0 and torch 2.13.0 on a CPU (Python 3.11):
#
#     gdn2, g = 0:          largest entry of the memory after 1, 2, 3 rounds: 1.0e+01 1.0e+02 1.0e+03
#     chunk form:           1.0e+01 1.0e+02 1.0e+03
#     one b of 0.5:         5.2e-01 1.7e-01 5.6e-02
#     gdn2, g = log 0.95:   largest entry after 3 rounds below 1: True
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile "torch==2.13.0"
"$folder/venv/bin/pip" install --quiet --no-compile --no-deps "fla-core==0.6.0" einops numpy
"$folder/venv/bin/python" - <<'EOF'
import importlib.metadata
import importlib.util
import math

import torch

path = importlib.metadata.distribution("fla-core").locate_file("fla/ops/gdn2/naive.py")
spec = importlib.util.spec_from_file_location("gdn2_naive", path)  # the package itself needs Triton
gdn2 = importlib.util.module_from_spec(spec)
spec.loader.exec_module(gdn2)
C, TOKENS = 0.3, 100
S = math.sqrt(1 - C * C)
BOTH = torch.tensor([[C, -S]] * TOKENS + [[S, -C]] * TOKENS)
ERASE = torch.tensor([[1.0, 0.0]] * TOKENS + [[0.0, 1.0]] * TOKENS)


def largest(run, rounds, decay=1.0, erase=ERASE):
    """The largest entry of a memory that starts at the identity, after some rounds of keys without values."""
    k, b = (x.repeat(rounds, 1)[None, :, None] for x in (BOTH, erase))
    g = torch.full_like(k, math.log(decay))
    _, memory = run(k, k, 0 * k, g, b, torch.ones_like(k), initial_state=torch.eye(2)[None, None], output_final_state=True)
    return memory.abs().max().item()


text = lambda values: " ".join(f"{x:.1e}" for x in values)
token, chunk = gdn2.naive_recurrent_gdn2, gdn2.naive_chunk_gdn2
grown = [largest(token, rounds) for rounds in (1, 2, 3)]
chunked = [largest(chunk, rounds) for rounds in (1, 2, 3)]
one = [largest(token, rounds, erase=0.5 * torch.ones_like(ERASE)) for rounds in (1, 2, 3)]
decayed = largest(token, 3, decay=0.95)
print("gdn2, g = 0:          largest entry of the memory after 1, 2, 3 rounds:", text(grown))
print("chunk form:          ", text(chunked))
print("one b of 0.5:        ", text(one))
print("gdn2, g = log 0.95:   largest entry after 3 rounds below 1:", decayed < 1)
factor = (1 - C * C) / C**2
for found in (grown, chunked):
    assert all(abs(x / factor ** (n + 1) - 1) < 0.05 for n, x in enumerate(found)), found
assert max(one) <= 1 + 1e-6
assert decayed < 1
EOF
