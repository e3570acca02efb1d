#!/usr/bin/env bash
# transformers: AutoTokenizer adds tokens that the model has no embedding for, depending on the model type beside tokenizer.json.
#
# Believed: a folder with tokenizer.json has the tokenizer that the file says; without `tokenizer_class` nothing is added to it.
# So is: for the model types mamba, mamba2, falcon_mamba and qwen3_5 a class is chosen whose defaults (`<|endoftext|>`,
#   `<|padding|>`) are added behind the vocabulary: ids 26 and 27 for a model of 26 tokens. Padding a batch then gives ids that are
#   out of range of the embedding. For llama, olmo_hybrid, bamba and lfm2 nothing is added. `tokenizer_class`
#   "PreTrainedTokenizerFast" in tokenizer_config.json prevents it.
# Source read: transformers/models/auto/tokenization_auto.py (names of classes by model type), models/gpt_neox/tokenization_gpt_neox.py.
# Seen on 2026-11-30 with transformers 5.24.0 and tokenizers 0.23.1 (Python 3.11), for a vocabulary of 26 tokens:
#
#     llama         TokenizersBackend       26 tokens
#     olmo_hybrid   TokenizersBackend       26 tokens
#     mamba         GPTNeoXTokenizer        28 tokens, of which beyond the model's: ['<|endoftext|>', '<|padding|>']
#     mamba2        GPTNeoXTokenizer        28 tokens, of which beyond the model's: ['<|endoftext|>', '<|padding|>']
#     falcon_mamba  GPTNeoXTokenizer        28 tokens, of which beyond the model's: ['<|endoftext|>', '<|padding|>']
#     qwen3_5       Qwen3_5Tokenizer        27 tokens, of which beyond the model's: ['<|endoftext|>']
#     mamba2 with tokenizer_class: 26 tokens
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile "transformers==5.24.0" "tokenizers==0.23.1"
cd "$folder"
"$folder/venv/bin/python" - <<'END'
import json
import pathlib

import transformers
from tokenizers import Tokenizer, models

transformers.logging.set_verbosity_error()
SIZE = 26


def loaded(kind, described):
    """The tokenizer of a folder for a model of this type, whose vocabulary has the letters a to z."""
    folder = pathlib.Path(kind)
    folder.mkdir(exist_ok=True)
    Tokenizer(models.BPE(vocab={chr(97 + i): i for i in range(SIZE)}, merges=[])).save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"model_type": kind, "vocab_size": SIZE, "eos_token_id": 0, "pad_token_id": 0}))
    (folder / "tokenizer_config.json").write_text(json.dumps(described))
    return transformers.AutoTokenizer.from_pretrained(folder)


added = {}
for kind in ("llama", "olmo_hybrid", "mamba", "mamba2", "falcon_mamba", "qwen3_5"):
    tokenizer = loaded(kind, {})
    added[kind] = sorted(token for token, i in tokenizer.get_vocab().items() if i >= SIZE)
    beyond = f", of which beyond the model's: {added[kind]}" if added[kind] else ""
    print(f"{kind:13} {type(tokenizer).__name__:23} {len(tokenizer)} tokens{beyond}")
named = loaded("mamba2", {"tokenizer_class": "PreTrainedTokenizerFast"})
print(f"mamba2 with tokenizer_class: {len(named)} tokens")
assert not added["llama"] and not added["olmo_hybrid"], "nothing should be added for these"
assert added["mamba2"] and added["qwen3_5"], "no longer so: nothing is added"
assert len(named) == SIZE, "a named class should add nothing"
END
