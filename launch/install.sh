#!/usr/bin/env bash
# Installs atlasjax from this checkout, with the jax of the machine's accelerator: launch/install.sh tpu|gpu|cpu [VENV]
#
# VENV defaults to ~/atlasjax-venv. "none" installs into the Python that is active, as in a container.
#
# atlasjax needs Python 3.11. Where the machine's python3 is older, as on Ubuntu 22.04, or can make no environment, uv
# (https://docs.astral.sh/uv) brings Python 3.12; uv itself is installed with pip, if it is not there.
set -euo pipefail

say() { echo "launch/install.sh: $1" >&2; }

accelerator=${1:?usage: launch/install.sh tpu|gpu|cpu [VENV]}
venv=${2:-$HOME/atlasjax-venv}
case $accelerator in
  tpu) extras=gcs,tpu ;;
  gpu) extras=gcs,cuda ;;
  cpu) extras=gcs ;;
  *) say "'$accelerator' is none of tpu, gpu, cpu."; exit 2 ;;
esac

cd "$(dirname "${BASH_SOURCE[0]}")/.."
is_new() { command -v python3 > /dev/null && python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))'; }
has="the machine has $(python3 --version 2> /dev/null || echo 'no python3')"
if [ "$venv" = none ]; then
  is_new || { say "$has; atlasjax needs Python 3.11 or newer."; exit 2; }
elif is_new && python3 -c 'import ensurepip' 2> /dev/null; then
  python3 -m venv "$venv"
else
  uv=(uv)
  if ! command -v uv > /dev/null; then
    python3 -m pip install --quiet --user uv || {
      say "$has, and no uv could be installed; install Python 3.11 or newer, or uv (https://docs.astral.sh/uv)."
      exit 2
    }
    uv=(python3 -m uv)
  fi
  say "$has; uv brings Python 3.12."
  "${uv[@]}" venv --quiet --seed --python 3.12 "$venv"
fi
if [ "$venv" != none ]; then
  # shellcheck disable=SC1091
  . "$venv/bin/activate"
fi
python3 -m pip install --quiet --upgrade pip
python3 -m pip install --quiet -e ".[$extras]"
say "installed with $(python3 --version)."
atlasjax --version
