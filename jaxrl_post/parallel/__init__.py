"""Devices and processes: the mesh, weight sync from learner to engine, and what processes send to each other."""
