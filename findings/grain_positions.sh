#!/usr/bin/env bash
# grain: ConcatThenSplit starts the positions of a document again where a row ends inside it.
#
# Believed: its docstring says "Positions indicate the position within the unpacked sequence". A document of 7 tokens in rows of 5
#   therefore has the positions 0 … 4 and, in the next row, 5 and 6.
# So is: the rest of a document has the positions 0, 1, …, like a document of its own. A model with positional embeddings is
#   trained as if a new text began there, and nothing in the row tells a rest from a beginning.
# Source read: grain/_src/python/dataset/transformations/packing_concat_then_split.py.
# Seen on 2026-11-30 with grain 0.2.18 on a CPU (Python 3.11):
#
#     tokens [10 11 12 13 14] segments [1 1 1 1 1] positions [0 1 2 3 4]
#     tokens [15 16 20 21 22] segments [1 1 2 2 2] positions [0 1 0 1 2]
#     tokens [23  0  0  0  0] segments [1 0 0 0 0] positions [0 0 0 0 0]
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile "grain==0.2.18"
"$folder/venv/bin/python" - <<'EOF'
import grain
import numpy as np

documents = [{"text": np.arange(10, 17)}, {"text": np.arange(20, 24)}]
rows = list(grain.experimental.ConcatThenSplitIterDataset(
    grain.MapDataset.source(documents).to_iter_dataset(), length_struct={"text": 5}
))
for row in rows:
    print("tokens", row["text"], "segments", row["text_segment_ids"], "positions", row["text_positions"])
assert "position within the unpacked sequence" in " ".join(grain.experimental.ConcatThenSplitIterDataset.__doc__.split())
assert rows[1]["text"][:2].tolist() == [15, 16], "the first document should go on in the second row"
assert rows[1]["text_positions"][:2].tolist() == [0, 1], "no longer so: positions go on"
EOF
