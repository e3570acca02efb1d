#!/usr/bin/env bash
# A training run on a Cloud TPU slice, from your own machine: launch/tpu_vm.sh create|install|start|log|stop|delete
#
# Fill in the values below, or set them in the environment.
set -euo pipefail

PROJECT=${PROJECT:-my-project}
ZONE=${ZONE:-us-west4-a}
NAME=${NAME:-atlasjax}
ACCELERATOR=${ACCELERATOR:-v5litepod-256}
RUNTIME=${RUNTIME:-v2-alpha-tpuv5-lite}
SPOT=${SPOT:-yes}                       # yes: cheaper, may be taken away at any time
REPOSITORY=${REPOSITORY:-https://example.com/atlasjax.git}
RUN_DIR=${RUN_DIR:-gs://my-bucket/runs/titans-340m}
DATA=${DATA:-gs://my-bucket/corpus}
PRESET=${PRESET:-titans-340m}
OPTIONS=${OPTIONS:---mesh.fsdp 16 --mesh.tensor 4}  # further options of `atlasjax train`

tpu() { gcloud compute tpus "$@" --project "$PROJECT" --zone "$ZONE"; }
on_all() { tpu tpu-vm ssh "$NAME" --worker=all --command "$1"; }

case ${1:-} in
  create)
    spot=()
    [ "$SPOT" = yes ] && spot=(--spot)
    tpu queued-resources create "$NAME" --node-id "$NAME" --accelerator-type "$ACCELERATOR" --runtime-version "$RUNTIME" "${spot[@]}"
    until [ "$(tpu queued-resources describe "$NAME" --format 'value(state.state)')" = ACTIVE ]; do
      echo "waiting for $ACCELERATOR in $ZONE"
      sleep 60
    done
    ;;
  install)
    on_all "set -e; rm -rf atlasjax; git clone --quiet $REPOSITORY atlasjax; atlasjax/launch/install.sh tpu"
    ;;
  start)
    # 8476 is the port that the firewall of Cloud TPU leaves open between the hosts of a slice.
    on_all "set -e; . atlasjax-venv/bin/activate; export JAX_COORDINATOR_PORT=8476
      nohup setsid atlasjax/launch/run.sh atlasjax train --preset $PRESET --processes.distributed --run-dir $RUN_DIR \
        --compilation-cache True --data.source text --data.packing documents --data.paths $DATA $OPTIONS > atlasjax.log 2>&1 < /dev/null &"
    ;;
  log)
    tpu tpu-vm ssh "$NAME" --worker="${2:-0}" --command 'tail -n 50 -f atlasjax.log'
    ;;
  stop)
    # All processes stop after the same step and save a checkpoint. [l]: or the pattern would match this command too.
    on_all "pkill -TERM -f '[l]aunch/run.sh' || true"
    ;;
  delete)
    tpu queued-resources delete "$NAME" --force
    ;;
  *)
    echo "usage: launch/tpu_vm.sh create|install|start|log [WORKER]|stop|delete" >&2
    exit 2
    ;;
esac
