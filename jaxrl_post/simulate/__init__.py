"""A run without a model: an engine, a learner and rewards that satisfy the protocols, over known lengths, and the command."""
