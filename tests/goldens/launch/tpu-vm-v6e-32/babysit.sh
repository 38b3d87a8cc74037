#!/usr/bin/env bash
# Keeps the run gsm8k-qwen3 going: asks for its slice, starts it on every host, and starts it again until it ends.
# To end it: interrupt this script, then gcloud compute tpus queued-resources delete gsm8k-qwen3 --force --project=my-project --zone=us-east5-b
set -euo pipefail
folder="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
nodes=(gsm8k-qwen3)
restarts_left=50
seconds_left=86400
pause_s="${JAXRL_PAUSE_S:-30}"

state() {
  gcloud compute tpus queued-resources describe gsm8k-qwen3 --project=my-project --zone=us-east5-b --format='value(state.state)' 2>/dev/null || true
}

create() {
  gcloud compute tpus queued-resources create gsm8k-qwen3 --project=my-project --zone=us-east5-b \
    --node-id=gsm8k-qwen3 \
    --accelerator-type=v6e-32 \
    --runtime-version=v2-alpha-tpuv6e
}

remove() {
  gcloud compute tpus queued-resources delete gsm8k-qwen3 --project=my-project --zone=us-east5-b --force --quiet
}

# Waits until the slice is there. A request that failed or was suspended is made anew.
wait_for_slice() {
  while true; do
    case "$(state)" in
      ACTIVE) return 0 ;;
      '') create ;;
      FAILED | SUSPENDED) remove ;;
    esac
    if ((seconds_left <= 0)); then
      echo "error: gsm8k-qwen3: the slice is not there after 86400 s; call this script again to wait longer" >&2
      remove
      exit 1
    fi
    sleep "$pause_s"
    seconds_left=$((seconds_left - pause_s - 1))
  done
}

# Starts every host of every slice, and returns the first exit code that is not 0.
run() {
  local code=0 one pids=()
  for one in "${nodes[@]}"; do
    gcloud compute tpus tpu-vm scp "$folder/host.sh" "$one:host.sh" --project=my-project --zone=us-east5-b --worker=all --quiet \
      || return 255
  done
  for one in "${nodes[@]}"; do
    gcloud compute tpus tpu-vm ssh "$one" --project=my-project --zone=us-east5-b --worker=all --quiet \
      --ssh-flag='-o ServerAliveInterval=30' --command='bash host.sh' &
    pids+=("$!")
  done
  for one in "${pids[@]}"; do
    wait "$one" || code="$((code ? code : $?))"
  done
  return "$code"
}

while true; do
  wait_for_slice
  code=0
  run || code="$?"
  case "$code" in
    0)
      remove
      exit 0
      ;;
    1 | 2)
      if [[ "$(state)" == ACTIVE ]]; then
        echo "error: gsm8k-qwen3 ended with exit code $code, a mistake that another start would repeat" >&2
        remove
        exit "$code"
      fi
      ;;
  esac
  if ((restarts_left <= 0)); then
    echo "error: gsm8k-qwen3 ended with exit code $code after 50 restarts" >&2
    remove
    exit "$code"
  fi
  restarts_left=$((restarts_left - 1))
  echo "gsm8k-qwen3: exit code $code, $restarts_left restarts left" >&2
  sleep "$pause_s"
done
