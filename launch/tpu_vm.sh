#!/usr/bin/env bash
# A training run on Cloud TPU slices, from your own machine: launch/tpu_vm.sh create|install|start|log|stop|delete
#
# Fill in the values below, or set them in the environment.
set -euo pipefail

PROJECT=${PROJECT:-my-project}
ZONE=${ZONE:-us-west4-a}
NAME=${NAME:-atlasjax}
ACCELERATOR=${ACCELERATOR:-v5litepod-256}  # of one slice
SLICES=${SLICES:-1}
RUNTIME=${RUNTIME:-v2-alpha-tpuv5-lite}
SPOT=${SPOT:-yes}                       # yes: cheaper, may be taken away at any time
SERVICE_ACCOUNT=${SERVICE_ACCOUNT:-}    # who reads and writes the bucket; empty: the default one of Compute Engine
WAIT_HOURS=${WAIT_HOURS:-24}            # how long `create` waits for the slices
REPOSITORY=${REPOSITORY:-https://example.com/atlasjax.git}
RUN_DIR=${RUN_DIR:-gs://my-bucket/runs/titans-340m}
DATA=${DATA:-gs://my-bucket/corpus}
PRESET=${PRESET:-titans-340m}
OPTIONS=${OPTIONS:---mesh.fsdp 16 --mesh.tensor 4}  # further options of `atlasjax train`
POLL=${POLL:-60}                        # seconds between two looks at the state

tpu() { gcloud compute tpus "$@" --project "$PROJECT" --zone "$ZONE"; }
fail() { echo "launch/tpu_vm.sh: $1" >&2; exit 1; }

node() { if ((SLICES > 1)); then echo "$NAME-$1"; else echo "$NAME"; fi; }

on_all() {
  for ((slice = 0; slice < SLICES; slice++)); do
    tpu tpu-vm ssh "$(node "$slice")" --worker=all --command "$1"
  done
}

state() { tpu queued-resources describe "$NAME" --format 'value(state.state)'; }

# The states are those of QueuedResourceState.State in the API of Cloud TPU.
wait_until_active() {
  local found unknown=0 end=$((SECONDS + WAIT_HOURS * 3600))
  while :; do
    found=$(state) || found=
    case $found in
      ACTIVE)
        return
        ;;
      CREATING | ACCEPTED | WAITING_FOR_RESOURCES | PROVISIONING)
        unknown=0
        ;;
      FAILED | SUSPENDING | SUSPENDED | DELETING)
        # None of these leads to ACTIVE. Why is in the data of the state.
        tpu queued-resources describe "$NAME" --format 'yaml(state)' >&2 || true
        fail "the request $NAME is $found and will not become ACTIVE. Take it back with 'delete', then 'create' it again."
        ;;
      *)
        # No answer, STATE_UNSPECIFIED, or a state that is newer than this file.
        ((++unknown < 10)) || fail "the state of $NAME is '${found:-not known}' for the tenth time; it must become ACTIVE."
        ;;
    esac
    ((SECONDS < end)) || fail "$NAME is ${found:-not known} after $WAIT_HOURS h (WAIT_HOURS). 'create' waits on, 'delete' takes the request back."
    echo "$ACCELERATOR in $ZONE: ${found:-not known}"
    sleep "$POLL"
  done
}

case ${1:-} in
  create)
    if ! state > /dev/null 2>&1; then  # otherwise it was asked for before, and only the waiting goes on
      nodes=(--node-id "$NAME")
      ((SLICES > 1)) && nodes=(--node-count "$SLICES" --node-prefix "$NAME")
      more=()
      [ "$SPOT" = yes ] && more+=(--spot)
      [ -n "$SERVICE_ACCOUNT" ] && more+=(--service-account "$SERVICE_ACCOUNT" --scopes https://www.googleapis.com/auth/cloud-platform)
      tpu queued-resources create "$NAME" "${nodes[@]}" --accelerator-type "$ACCELERATOR" --runtime-version "$RUNTIME" \
        --valid-until-duration "${WAIT_HOURS}h" ${more[@]+"${more[@]}"}  # bash 3.2 of macOS knows no empty array
    fi
    wait_until_active
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
    tpu tpu-vm ssh "$(node "${3:-0}")" --worker="${2:-0}" --command 'tail -n 50 -f atlasjax.log'
    ;;
  stop)
    # All processes stop after the same step and save a checkpoint. [l]: or the pattern would match this command too.
    on_all "pkill -TERM -f '[l]aunch/run.sh' || true"
    ;;
  delete)
    tpu queued-resources delete "$NAME" --force
    ;;
  *)
    echo "usage: launch/tpu_vm.sh create|install|start|log [WORKER [SLICE]]|stop|delete" >&2
    exit 2
    ;;
esac
