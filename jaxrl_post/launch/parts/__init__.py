"""The parts of a run, each made from its config: inputs, policy, learner and engine, second models, graders."""
