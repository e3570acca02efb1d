#!/usr/bin/env bash
# A training run on a cluster made with xpk (`xpk cluster create`): launch/xpk.sh [OPTION OF xpk workload create ...]
set -euo pipefail

CLUSTER=${CLUSTER:-my-cluster}
NAME=${NAME:-atlasjax}
TPU_TYPE=${TPU_TYPE:-v5litepod-256}
SLICES=${SLICES:-1}
IMAGE=${IMAGE:-REGION-docker.pkg.dev/PROJECT/REPOSITORY/atlasjax}
RUN_DIR=${RUN_DIR:-gs://my-bucket/runs/titans-340m}
DATA=${DATA:-gs://my-bucket/corpus}
PRESET=${PRESET:-titans-340m}
OPTIONS=${OPTIONS:---mesh.fsdp 16 --mesh.tensor 4}  # further options of `atlasjax train`

xpk workload create --cluster "$CLUSTER" --workload "$NAME" --tpu-type "$TPU_TYPE" --num-slices "$SLICES" \
  --docker-image "$IMAGE" --max-restarts 20 "$@" \
  --command "RESTARTS=0 JAX_COORDINATOR_PORT=8476 /opt/atlasjax/launch/run.sh atlasjax train --preset $PRESET \
--processes.distributed --run-dir $RUN_DIR --compilation-cache True --data.source text --data.packing documents --data.paths $DATA $OPTIONS"
