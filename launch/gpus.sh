#!/usr/bin/env bash
# A training run on all GPUs of one machine, in one process: launch/gpus.sh [OPTION OF atlasjax train ...]
set -euo pipefail

RUN_DIR=${RUN_DIR:-runs/titans-340m}
DATA=${DATA:-corpus}
PRESET=${PRESET:-titans-340m}

export RESTARTS=${RESTARTS:-3}
exec "$(dirname "${BASH_SOURCE[0]}")/run.sh" atlasjax train --preset "$PRESET" --run-dir "$RUN_DIR" --mesh.data -1 \
  --data.source text --data.packing documents --data.paths "$DATA" "$@"
