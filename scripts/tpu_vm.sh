#!/usr/bin/env bash
# A TPU VM, or every worker of a slice, from making it to deleting it.
#
#   scripts/tpu_vm.sh disk   NAME ZONE v6e-8 500GB       # for models; see mount
#   scripts/tpu_vm.sh create NAME ZONE v6e-8 [--spot] [--queued] [--disk=D]
#   scripts/tpu_vm.sh queue  NAME ZONE             # what became of --queued
#   scripts/tpu_vm.sh setup  NAME ZONE            # copies this commit, installs
#   scripts/tpu_vm.sh mount  NAME ZONE             # the disk, at /data
#   scripts/tpu_vm.sh put    NAME ZONE P.jsonl     # a file, to all workers
#   scripts/tpu_vm.sh run    NAME ZONE scripts/generate.py --mesh=model:8 ...
#   scripts/tpu_vm.sh start  NAME ZONE scripts/train.py ...   # outlives ssh
#   scripts/tpu_vm.sh status NAME ZONE             # of what start began
#   scripts/tpu_vm.sh log    NAME ZONE [LINES]     # its end, of worker 0
#   scripts/tpu_vm.sh stop   NAME ZONE
#   scripts/tpu_vm.sh fetch  NAME ZONE runs/sweep  # a folder of worker 0
#   scripts/tpu_vm.sh delete NAME ZONE [--queued]  # the disk stays
#
# Types are v6e-8, v5litepod-16, v5p-8, v4-8, tpu7x-8. `run` and `start` run on
# all workers at once: with several add --distributed, and give --disk=D:ro,
# since only one worker may write to a disk. Spot VMs are taken away: give a run
# a folder in gs://, and the same `start` on another VM goes on from there.
# TPU_VERSION=... overrides the runtime; PREFIX=echo only prints the commands.
set -euo pipefail

usage() {
  sed -n '2,/^set/ s/^# \{0,1\}//p' "$0"
  exit 2
}

cloud() { ${PREFIX:-} gcloud compute "$@"; }
tpu() { cloud tpus tpu-vm "$@"; }

# On all workers, or on those of --worker.
remote() {
  local command=$1
  shift
  tpu ssh "$name" --zone="$zone" "${@:---worker=all}" --command="$command"
}

runtime_of() {
  case "$1" in
    v5lite*) echo v2-alpha-tpuv5-lite ;;
    v5p*) echo v2-alpha-tpuv5 ;;
    v6e*) echo v2-alpha-tpuv6e ;;
    tpu7x*) echo v2-alpha-tpu7-ubuntu2404 ;;
    v2* | v3* | v4*) echo tpu-ubuntu2204-base ;;
    *)
      echo "no runtime known for $1; set TPU_VERSION" >&2
      exit 1
      ;;
  esac
}

create() {
  local type=$1 queued='' options=() version project option disk mode
  shift
  for option in "$@"; do
    case "$option" in
      --spot) options+=(--spot) ;;
      --queued) queued=yes ;;
      --disk=*)
        project=$(gcloud config get-value project 2>/dev/null || true)
        disk=${option#*=} mode=read-write
        [[ $disk ]] || usage
        [[ $disk != *:ro ]] || mode=read-only
        disk=projects/${project:-PROJECT}/zones/$zone/disks/${disk%:ro}
        options+=("--data-disk=source=$disk,mode=$mode")
        ;;
      *) usage ;;
    esac
  done
  version=${TPU_VERSION:-$(runtime_of "$type")}
  if [[ $queued ]]; then
    cloud tpus queued-resources create "$name" --node-id="$name" \
      --zone="$zone" --accelerator-type="$type" --runtime-version="$version" \
      ${options[@]+"${options[@]}"}
  else
    tpu create "$name" --zone="$zone" --accelerator-type="$type" \
      --version="$version" ${options[@]+"${options[@]}"}
  fi
}

# Models that are downloaded lie on the disk, where there is one.
environment='if mountpoint -q /data && [ -w /data ]; then
  export HF_HOME=/data/huggingface SPECDEC_CACHE=/data/specdec; fi'

[[ $# -ge 3 ]] || usage
what=$1 name=$2 zone=$3
shift 3
case "$what" in
  queue | setup | mount | status | stop) [[ $# -eq 0 ]] || usage ;;
  delete) [[ $# -le 1 ]] || usage ;;
esac

case "$what" in
  disk)
    [[ $# -eq 2 ]] || usage
    case "$1" in
      v6e* | tpu7x*) kind=hyperdisk-balanced ;;
      *) kind=pd-balanced ;;
    esac
    cloud disks create "$name" --zone="$zone" --size="$2" --type="$kind"
    ;;
  create)
    [[ $# -ge 1 ]] || usage
    create "$@"
    ;;
  queue)
    cloud tpus queued-resources describe "$name" --zone="$zone" \
      --format='value(state.state)'
    ;;
  setup)
    archive=$(mktemp --suffix=.tar.gz)
    trap 'rm -f "$archive"' EXIT
    git -C "$(dirname "$0")/.." archive --format=tar.gz HEAD >"$archive"
    tpu scp "$archive" "$name:specdec.tar.gz" --zone="$zone" --worker=all
    remote '
      mkdir -p specdec && tar xzf specdec.tar.gz -C specdec &&
      pip3 install -q --user uv && uv=$HOME/.local/bin/uv &&
      $uv venv -q --python 3.11 venv &&  # the image has another one
      $uv pip install -q --python venv/bin/python -e "specdec[tpu,hub,gcs]"'
    ;;
  mount)
    # The one disk of which nothing is mounted; formatted if it is blank.
    remote '
      found=
      for disk in $(lsblk -dnpo NAME,TYPE | sed -n "s/ *disk$//p"); do
        used=$(lsblk -no MOUNTPOINT "$disk" | tr -d "[:space:]")
        [ -n "$used" ] || found=$disk
      done
      [ -n "$found" ] || { echo "no disk is left to mount" >&2; exit 1; }
      sudo mkdir -p /data
      if [ "$(lsblk -dno RO "$found" | tr -d " ")" = 1 ]; then
        sudo mount -o ro,noload "$found" /data
      else
        sudo blkid "$found" >/dev/null || sudo mkfs.ext4 -q -m 0 "$found"
        sudo mount "$found" /data && sudo chmod a+rwx /data
      fi'
    ;;
  put)
    [[ $# -eq 1 ]] || usage
    tpu scp "$1" "$name:specdec/" --zone="$zone" --worker=all
    ;;
  run)
    [[ $# -ge 1 ]] || usage
    remote "$environment; cd specdec && ../venv/bin/python $(printf '%q ' "$@")"
    ;;
  start)
    [[ $# -ge 1 ]] || usage
    program="../venv/bin/python $(printf '%q ' "$@"); echo \$? >run.status"
    remote "$environment; cd specdec &&
      if [ -e run.pid ] && [ ! -e run.status ] &&
        kill -0 \$(cat run.pid) 2>/dev/null; then
        echo 'a run is going on: see status and log, or stop it' >&2; exit 1
      fi
      rm -f run.status
      setsid nohup bash -c $(printf '%q' "$program") >run.log 2>&1 </dev/null &
      echo \$! >run.pid"
    ;;
  status)
    remote 'cd specdec && echo "$(hostname): $(
      if [ -e run.status ]; then echo "ended with status $(cat run.status)"
      elif [ ! -e run.pid ]; then echo "nothing was started"
      elif kill -0 $(cat run.pid) 2>/dev/null; then echo "running"
      else echo "killed"
      fi)"'
    ;;
  log)
    [[ $# -le 1 && ${1:-20} =~ ^[0-9]+$ ]] || usage
    remote "tail -n ${1:-20} specdec/run.log" --worker=0
    ;;
  stop) remote 'cd specdec && kill -TERM -- -$(cat run.pid)' ;;
  fetch)
    [[ $# -eq 1 ]] || usage
    into="$(dirname "$1")" # scp would copy into a folder that is there
    ${PREFIX:-} mkdir -p "$into"
    tpu scp --recurse "$name:specdec/${1%/}" "$into" --zone="$zone" --worker=0
    ;;
  delete)
    case "${1:-}" in
      --queued)
        cloud tpus queued-resources delete "$name" --zone="$zone" \
          --force --quiet
        ;;
      '') tpu delete "$name" --zone="$zone" --quiet ;;
      *) usage ;;
    esac
    ;;
  *) usage ;;
esac
