"""The policy's network: one decoder, presets of its shape, and the file formats of its weights."""
