#!/usr/bin/env bash
# transformers: behind a cache, Bamba counts the positions of its attention from 0 again.
#
# Believed: as with Llama and nearly every other model of the library, `position_ids` may be left out: a call with a cache goes on
#   where the cache ends, so token-by-token logits are those of one pass.
# So is: without `position_ids`, Bamba rotates the queries and keys of every call from position 0, whatever the cache holds. Its
#   recurrent layers are right, so the text stays fluent. Llama, beside it, goes on behind the cache. `generate` passes
#   `position_ids` and is right.
# Source read: transformers/models/bamba/modeling_bamba.py, `BambaModel.forward`: `torch.arange(hidden_states.shape[1])`.
# Seen on 2026-11-30 with transformers 5.24.0 and torch 2.13.0 on a CPU (Python 3.11):
#
#     token by token against one pass, relative to the largest logit
#     Llama without position_ids: 3.7e-07
#     Bamba with position_ids:    4.1e-07
#     Bamba without position_ids: 2.2e-02
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile "torch==2.13.0"
"$folder/venv/bin/pip" install --quiet --no-compile "transformers==5.24.0"
"$folder/venv/bin/python" - <<'EOF'
import torch
import transformers

transformers.logging.set_verbosity_error()
ENDS = {"vocab_size": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 2, "mamba_d_state": 8, "mamba_chunk_size": 8}


def difference(name, more, positions):
    """Of the logits of single tokens behind a prefill from those of one pass, relative to the largest logit."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SIZES, **ENDS, **more)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    for parameter in model.parameters():  # a fresh model's attention hardly sees positions
        parameter.data.add_(0.1 * torch.randn_like(parameter))
    tokens = torch.randint(3, 64, (1, 16))
    with torch.no_grad():
        whole = model(tokens, use_cache=False).logits
        cache, pieces, start = None, [], 0
        for piece in tokens.split([6] + [1] * 10, dim=1):
            place = {"position_ids": torch.arange(start, start + piece.shape[1])[None]} if positions else {}
            out = model(piece, use_cache=True, cache=cache, **place)
            cache, start = out.cache, start + piece.shape[1]
            pieces.append(out.logits)
    return ((torch.cat(pieces, 1) - whole).abs().max() / whole.abs().max()).item()


bamba = {"attn_layer_indices": [1], **MAMBA}
print("token by token against one pass, relative to the largest logit")
llama = difference("Llama", {}, positions=False)
print(f"Llama without position_ids: {llama:.1e}")
given = difference("Bamba", bamba, positions=True)
print(f"Bamba with position_ids:    {given:.1e}")
missing = difference("Bamba", bamba, positions=False)
print(f"Bamba without position_ids: {missing:.1e}")
assert llama < 1e-5, "Llama should go on behind its cache"
assert given < 1e-5, "Bamba with positions should agree with its whole pass"
assert missing > 1e-3, "no longer so: Bamba goes on behind its cache"
EOF
