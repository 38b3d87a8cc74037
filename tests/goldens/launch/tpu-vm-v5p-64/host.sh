#!/usr/bin/env bash
# Runs on every host of the slice: one process of the run, in a container.
set -euo pipefail
sudo gcloud auth configure-docker us-docker.pkg.dev --quiet
command -v mount.nfs >/dev/null || (sudo apt-get update -qq && sudo apt-get install -y -qq nfs-common)
mountpoint -q /mnt || sudo mount -t nfs 10.0.0.2:/shared /mnt
sudo docker rm --force gsm8k-qwen3 >/dev/null 2>&1 || true
exec sudo docker run --rm --name=gsm8k-qwen3 \
  --privileged --network=host --stop-timeout=360 --volume=/mnt:/mnt \
  --env=JAXRL_GRACE_S=360 \
  --env=JAXRL_MODELS=/mnt/models \
  --env=JAXRL_DATA=/mnt/data \
  us-docker.pkg.dev/my-project/rl/jaxrl-post:1 \
  python -m jaxrl_post.main --config=configs/models/gsm8k_qwen3.py:32b-v5p-64 --run-dir=/mnt/runs/first --resume
