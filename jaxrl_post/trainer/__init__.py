"""From groups to new weights: state, optimizer, packed attention and the learner."""
