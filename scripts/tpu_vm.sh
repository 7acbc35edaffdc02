#!/usr/bin/env bash
# A TPU VM, or every worker of a slice, from making it to deleting it.
#
#   scripts/tpu_vm.sh create NAME ZONE v6e-8     # or v5litepod-16, v5p-8, v4-8
#   scripts/tpu_vm.sh setup  NAME ZONE           # copies this commit, installs
#   scripts/tpu_vm.sh put    NAME ZONE P.jsonl        # a file, to all workers
#   scripts/tpu_vm.sh run    NAME ZONE scripts/generate.py --mesh=model:8 ...
#   scripts/tpu_vm.sh fetch  NAME ZONE runs/sweep     # a folder of worker 0
#   scripts/tpu_vm.sh delete NAME ZONE
#
# `run` runs on all workers at once: with more than one add --distributed.
# TPU_VERSION=... overrides the runtime; PREFIX=echo only prints the commands.
set -euo pipefail

usage() {
  sed -n '2,12p' "$0" | cut -c3-
  exit 2
}

tpu() { ${PREFIX:-} gcloud compute tpus tpu-vm "$@"; }

runtime_of() {
  case "$1" in
    v5lite*) echo v2-alpha-tpuv5-lite ;;
    v5p*) echo v2-alpha-tpuv5 ;;
    v6e*) echo v2-alpha-tpuv6e ;;
    v2* | v3* | v4*) echo tpu-ubuntu2204-base ;;
    *)
      echo "no runtime known for $1; set TPU_VERSION" >&2
      exit 1
      ;;
  esac
}

[[ $# -ge 3 ]] || usage
what=$1 name=$2 zone=$3
shift 3

case "$what" in
  create)
    [[ $# -eq 1 ]] || usage
    version=${TPU_VERSION:-$(runtime_of "$1")}
    tpu create "$name" --zone="$zone" --accelerator-type="$1" \
      --version="$version"
    ;;
  setup)
    archive=$(mktemp --suffix=.tar.gz)
    trap 'rm -f "$archive"' EXIT
    git -C "$(dirname "$0")/.." archive --format=tar.gz HEAD >"$archive"
    tpu scp "$archive" "$name:specdec.tar.gz" --zone="$zone" --worker=all
    tpu ssh "$name" --zone="$zone" --worker=all --command='
      mkdir -p specdec && tar xzf specdec.tar.gz -C specdec &&
      pip3 install -q --user uv && uv=$HOME/.local/bin/uv &&
      $uv venv -q --python 3.11 venv &&  # the image has an older one
      $uv pip install -q --python venv/bin/python -e "specdec[tpu,hub]"'
    ;;
  put)
    [[ $# -eq 1 ]] || usage
    tpu scp "$1" "$name:specdec/" --zone="$zone" --worker=all
    ;;
  run)
    [[ $# -ge 1 ]] || usage
    tpu ssh "$name" --zone="$zone" --worker=all \
      --command="cd specdec && ../venv/bin/python $(printf '%q ' "$@")"
    ;;
  fetch)
    [[ $# -eq 1 ]] || usage
    mkdir -p "$(dirname "$1")"
    tpu scp --recurse "$name:specdec/$1" "$1" --zone="$zone" --worker=0
    ;;
  delete) tpu delete "$name" --zone="$zone" --quiet ;;
  *) usage ;;
esac
