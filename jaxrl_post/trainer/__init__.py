"""Turns groups into new weights: state, optimizer, packed attention and the learner."""
