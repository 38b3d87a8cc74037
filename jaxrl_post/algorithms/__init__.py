"""The objective: advantages, losses and log-probs as pure functions, chosen by their standard names."""
