#!/usr/bin/env bash
# transformers: `"rope_parameters": null` in an OLMo-Hybrid config rotates, with base 10,000.
#
# Believed: null is no rotation. The default of the config class is None, and the model makes no rotation where the field is None.
# So is: null, like a field that is left out, is replaced by the default rotation when the config is made, so the branch for None is
#   never taken. Positions are switched off only by {"rope_theta": null}. A config that a converter writes with null loads without
#   a warning, and its logits are those of another model.
# Source read: transformers/models/olmo_hybrid/modeling_olmo_hybrid.py (`OlmoHybridModel.__init__`: rotary only if the parameters and
#   their theta are not None), modeling_rope_utils.py (what fills the field).
# Seen on 2026-11-30 with transformers 5.24.0 and torch 2.13.0 on a CPU (Python 3.11):
#
#     difference from base 10,000, relative to the largest logit
#     rope_parameters left out:      0.0e+00
#     rope_parameters None:          0.0e+00
#     {"rope_theta": None}:          8.4e-01
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile "torch==2.13.0"
"$folder/venv/bin/pip" install --quiet --no-compile "transformers==5.24.0"
"$folder/venv/bin/python" - <<'END'
import torch
import transformers

transformers.logging.set_verbosity_error()
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
ENDS = {"vocab_size": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
LAYERS = {"layer_types": ["linear_attention", "full_attention"]}


def logits(**rotation):
    torch.manual_seed(0)
    config = transformers.OlmoHybridConfig(**SIZES, **ENDS, **LAYERS, **rotation)
    model = transformers.OlmoHybridForCausalLM(config).eval()
    for parameter in model.parameters():  # a fresh model's attention hardly sees positions
        parameter.data.add_(0.1 * torch.randn_like(parameter))
    with torch.no_grad():
        return model(torch.randint(3, 64, (1, 16)), use_cache=False).logits


given = logits(rope_parameters={"rope_type": "default", "rope_theta": 10000.0})
apart = lambda other: ((other - given).abs().max() / given.abs().max()).item()
left_out, null, off = apart(logits()), apart(logits(rope_parameters=None)), apart(logits(rope_parameters={"rope_theta": None}))
print("difference from base 10,000, relative to the largest logit")
print(f"rope_parameters left out:      {left_out:.1e}")
print(f"rope_parameters None:          {null:.1e}")
print(f'{{"rope_theta": None}}:          {off:.1e}')
assert null == left_out == 0, "no longer so: null is not base 10,000"
assert off > 1e-4, "a theta of None should switch the rotation off"
END
