"""The whole run, saved as one unit: arrays, host state, what it belongs to, and how far its logs have come."""
