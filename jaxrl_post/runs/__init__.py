"""The folder of a run: its lock, checkpoints, logs and bucket, and its one reader."""
