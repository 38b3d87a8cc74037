"""What is optimised: advantages, losses and log-probs as pure functions, chosen by their field-standard names."""
