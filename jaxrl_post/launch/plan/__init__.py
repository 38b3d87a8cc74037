"""What is known of a run before it begins: bytes of each device, seconds of a step, and the mode that fits."""
