#!/usr/bin/env bash
# transformers: the limits of Mamba-2's time step hold in a prefill and not while tokens are decoded.
#
# Believed: `time_step_limit` of Mamba2Config is part of the model, so reading a sequence with a cache, token by token, gives the
#   logits of one pass over it.
# So is: a pass of several tokens clamps the time step (with or without a cache), a pass of one token behind a cache does not. From
#   the first generated token on, the model is another one, and nothing says so. With the limits (0, infinity) the two agree.
# Source read: transformers/models/mamba2/modeling_mamba2.py: `Mamba2Mixer.forward` gives `dt_limit` to `mamba2_chunk_scan` and to
#   the fused function, and no limit to `mamba2_selective_state_update`.
# Seen on 2026-11-30 with transformers 5.24.0 and torch 2.13.0 on a CPU (Python 3.11):
#
#     difference from one pass over the sequence, relative to the largest logit
#     no limit, token by token:       5.4e-07
#     limit 0.01, pieces of 6 tokens: 2.7e-07
#     limit 0.01, token by token:     9.0e-03
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile "torch==2.13.0"
"$folder/venv/bin/pip" install --quiet --no-compile "transformers==5.24.0"
"$folder/venv/bin/python" - <<'EOF'
import torch
import transformers
from transformers import Mamba2Config, Mamba2ForCausalLM

transformers.logging.set_verbosity_error()


def difference(limit, sizes):
    """Of the logits of pieces of these sizes from those of one pass, relative to the largest logit."""
    config = Mamba2Config(
        hidden_size=32, num_heads=8, head_dim=8, state_size=8, n_groups=2, expand=2, num_hidden_layers=2, chunk_size=8,
        vocab_size=64, bos_token_id=1, eos_token_id=2, pad_token_id=0, time_step_limit=limit,
    )
    torch.manual_seed(0)
    model = Mamba2ForCausalLM(config).eval()
    tokens = torch.randint(3, 64, (1, sum(sizes)))
    with torch.no_grad():
        whole = model(tokens, use_cache=False).logits
        cache, pieces = None, []
        for piece in tokens.split(sizes, dim=1):
            out = model(piece, use_cache=True, cache=cache)
            cache = out.cache
            pieces.append(out.logits)
    return ((torch.cat(pieces, 1) - whole).abs().max() / whole.abs().max()).item()


pieces, singles = [6, 6, 6], [6] + [1] * 12
print("difference from one pass over the sequence, relative to the largest logit")
free = difference((0.0, float("inf")), singles)
print(f"no limit, token by token:       {free:.1e}")
several = difference((0.0, 0.01), pieces)
print(f"limit 0.01, pieces of 6 tokens: {several:.1e}")
single = difference((0.0, 0.01), singles)
print(f"limit 0.01, token by token:     {single:.1e}")
assert free < 1e-5, "without limits the two ways should agree"
assert several < 1e-5, "pieces of several tokens should agree"
assert single > 1e-3, "no longer so: single tokens respect the limit"
EOF
