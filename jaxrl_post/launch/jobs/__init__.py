"""From a config to a job on several hosts: one file a target, and what all of them check first."""
