"""The rollout engine: requests in, rollouts out, computed as rows."""
