"""The ring without a device: an engine, a learner and rewards that satisfy the protocols, driven by known lengths."""
