"""Devices and processes: the mesh, weight sync from learner to engine, and what processes tell each other."""
