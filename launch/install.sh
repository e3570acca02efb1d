#!/usr/bin/env bash
# Installs atlasjax from this checkout, with the jax of the machine's accelerator: launch/install.sh tpu|gpu|cpu [VENV]
#
# VENV defaults to ~/atlasjax-venv. "none" installs into the Python that is active, as in a container.
set -euo pipefail

accelerator=${1:?usage: launch/install.sh tpu|gpu|cpu [VENV]}
venv=${2:-$HOME/atlasjax-venv}
case $accelerator in
  tpu) jax='jax[tpu]>=0.10.2' ;;
  gpu) jax='jax[cuda13]>=0.10.2' ;;
  cpu) jax='jax>=0.10.2' ;;
  *) echo "launch/install.sh: '$accelerator' is none of tpu, gpu, cpu." >&2; exit 2 ;;
esac

cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [ "$venv" != none ]; then
  python3 -m venv "$venv"
  # shellcheck disable=SC1091
  . "$venv/bin/activate"
fi
python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
  echo "launch/install.sh: $(python3 --version) is too old; atlasjax needs Python 3.11 or newer." >&2
  exit 2
}
python3 -m pip install --quiet --upgrade pip
python3 -m pip install --quiet "$jax" -e '.[gcs]'
atlasjax --version
