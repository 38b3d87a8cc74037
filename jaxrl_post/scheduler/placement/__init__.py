"""Where and in which order the rollouts of a round start."""
