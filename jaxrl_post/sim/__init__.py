"""The ring without a device: an engine, a learner and rewards that satisfy the protocols, over known lengths."""
