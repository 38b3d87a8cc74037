"""The config of a run: its options, what must hold between them, how files and overrides are read, and the reference.

  conditions   when an option is read, as one line
  fields       how an option is declared
  relations    the two rules: nothing that is set is ignored, and options do not contradict each other
  scheduling, rules   the entries of the second rule, those of the simulator too in the first
  generation, training, schema   the options, by section
  reader       defaults, files and overrides become one frozen Config
  reference    the options as text: `python -m jaxrl_post.main --help` and docs/options.md

Each imports only those above it, and none imports jax.
"""

from jaxrl_post.config.fields import any_of_type, at_least, mapping, one_of
from jaxrl_post.config.generation import Engine, Sampling, Scheduler, Speculation
from jaxrl_post.config.reader import default, load, resolve, to_dict
from jaxrl_post.config.schema import Checkpoint, Config, Data, Eval, History, Mesh, Model, Reward
from jaxrl_post.config.training import Algorithm, Batch, Optimizer

__all__ = [
    "Algorithm",
    "Batch",
    "Checkpoint",
    "Config",
    "Data",
    "Engine",
    "Eval",
    "History",
    "Mesh",
    "Model",
    "Optimizer",
    "Reward",
    "Sampling",
    "Scheduler",
    "Speculation",
    "any_of_type",
    "at_least",
    "default",
    "load",
    "mapping",
    "one_of",
    "resolve",
    "to_dict",
]
