#!/usr/bin/env bash
# Runs one process of a job, and starts it again when another process of the job was lost: launch/run.sh COMMAND [ARGUMENT ...]
#
# The same command on every host. It goes on from the newest checkpoint. Environment:
#   RESTARTS     how often it starts again (default 20)
#   RESTART_WAIT seconds between two tries (default 30), so that a lost machine can come back
set -uo pipefail

[ $# -gt 0 ] || { echo "usage: launch/run.sh COMMAND [ARGUMENT ...]" >&2; exit 2; }
restarts=${RESTARTS:-20}
wait_seconds=${RESTART_WAIT:-30}
child=
stopped=
between=
# bash would wait for the command and not pass the signal on. Between two tries there is nothing to save.
trap 'stopped=yes; [ -n "$child" ] && kill -TERM "$child" 2>/dev/null; [ -z "$between" ] || exit 143' TERM INT

for ((try = 0; ; try++)); do
  between=
  "$@" &
  child=$!
  while :; do
    wait "$child"
    code=$?
    kill -0 "$child" 2>/dev/null || break  # a signal ends `wait` before the command has saved its checkpoint
  done
  case $code in
    # 75: atlasjax says that another process was lost. The others: the process was killed or aborted, as jax's coordination service does.
    75 | 134 | 137 | 139) ;;
    *) exit "$code" ;;
  esac
  between=yes
  [ -z "$stopped" ] || exit "$code"
  if ((try >= restarts)); then
    echo "launch/run.sh: exit code $code; $restarts restarts are used up." >&2
    exit "$code"
  fi
  echo "launch/run.sh: exit code $code; starting again in $wait_seconds s ($((try + 1)) of $restarts)." >&2
  sleep "$wait_seconds" &  # a signal ends `wait`, but not a command in the foreground
  child=$!
  wait "$child"
done
