#!/usr/bin/env bash
# Runs on every host of the slice: one process of the run, in a container.
set -euo pipefail
sudo gcloud auth configure-docker us-docker.pkg.dev --quiet
WANDB_API_KEY="$(gcloud secrets versions access latest --secret=wandb --project=my-project)"
export WANDB_API_KEY
command -v mount.nfs >/dev/null || (sudo apt-get update -qq && sudo apt-get install -y -qq nfs-common)
mountpoint -q /mnt || sudo mount -t nfs 10.0.0.2:/shared /mnt
sudo docker rm --force gsm8k-qwen2-5-7b >/dev/null 2>&1 || true
exec sudo --preserve-env=WANDB_API_KEY docker run --rm --name=gsm8k-qwen2-5-7b \
  --privileged --network=host --stop-timeout=150 --volume=/mnt:/mnt \
  --env=JAXRL_GRACE_S=150 \
  --env=JAXRL_MODELS=/mnt/models \
  --env=JAXRL_DATA=/mnt/data \
  --env=WANDB_API_KEY \
  us-docker.pkg.dev/my-project/rl/jaxrl-post:1 \
  python -m jaxrl_post.main --config=configs/models/gsm8k_qwen2_5_7b.py:v5e-16 --config.logger.wandb=online --run-dir=/mnt/runs/first --resume
