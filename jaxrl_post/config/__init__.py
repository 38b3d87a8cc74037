"""The config of a run: its options, what must hold between them, how files and overrides are read, and the reference.

  address      what a user names of a bucket, SCHEME://BUCKET/NAME
  fields       how an option is declared, and when it is read
  local_path   what a user may name as a path: no URL
  relations    the two rules. Nothing that is set is ignored. Options do not contradict each other.
  scheduling   relations between options of schedulers. Runs and the simulator share them.
  learning     relations between options of losses, estimators, optimizers and LoRA.
  scoring      the options of environments, reward functions and the judge, and relations between those of a judge.
  rules        all relations of a run: these, and those of everything else.
  generation, token_terms, training, monitoring, schema   the other options, by section
  elsewhere    what options of verl, TRL and OpenRLHF are called here: errors and docs/coming_from.md
  reader       defaults, files and overrides become one frozen Config
  reference    the options as text: `python -m jaxrl_post.main --help` and docs/options.md
  command_line the one parser of flags, of a run, a simulation and every command

Each imports only those above it, and none imports jax.
"""

from jaxrl_post.config.fields import any_of_type, file_path, fraction, mapping, number, on, one_of, positive
from jaxrl_post.config.generation import EngineConfig, SamplingConfig, SchedulerConfig, SpeculationConfig
from jaxrl_post.config.local_path import check_place, refuse_url
from jaxrl_post.config.monitoring import AlarmConfig, LoggerConfig, WatchdogConfig
from jaxrl_post.config.reader import assign, chosen, default, load, resolve, to_dict
from jaxrl_post.config.schema import (
    CheckpointConfig,
    Config,
    DataConfig,
    EvalConfig,
    HistoryConfig,
    MeshConfig,
    PolicyConfig,
    RewardConfig,
)
from jaxrl_post.config.token_terms import TeacherConfig
from jaxrl_post.config.training import AlgorithmConfig, BatchConfig, CriticConfig, LoraConfig, OptimizerConfig

__all__ = [
    "AlarmConfig",
    "AlgorithmConfig",
    "BatchConfig",
    "CheckpointConfig",
    "Config",
    "CriticConfig",
    "DataConfig",
    "EngineConfig",
    "EvalConfig",
    "HistoryConfig",
    "LoggerConfig",
    "LoraConfig",
    "MeshConfig",
    "OptimizerConfig",
    "PolicyConfig",
    "RewardConfig",
    "SamplingConfig",
    "SchedulerConfig",
    "SpeculationConfig",
    "TeacherConfig",
    "WatchdogConfig",
    "any_of_type",
    "assign",
    "check_place",
    "chosen",
    "default",
    "file_path",
    "fraction",
    "load",
    "mapping",
    "number",
    "on",
    "one_of",
    "positive",
    "refuse_url",
    "resolve",
    "to_dict",
]
