"""The config of a run: its options, what must hold between them, how files and overrides are read, and the reference.

  conditions   when an option is read, as one line
  fields       how an option is declared
  local_path   what a user may name as a path: no URL
  relations    the two rules. Nothing that is set is ignored. Options do not contradict each other.
  scheduling   relations between options of schedulers. Runs and the simulator share them.
  learning     relations between options of losses, optimizers and LoRA.
  estimators   relations between options of a critic, and of a greedy baseline.
  rules        all relations of a run: these, and those of everything else.
  generation, training, monitoring, schema   the options, by section
  elsewhere    what options of verl, TRL and OpenRLHF are called here: errors and docs/coming_from.md
  reader       defaults, files and overrides become one frozen Config
  reference    the options as text: `python -m jaxrl_post.main --help` and docs/options.md

Each imports only those above it, and none imports jax.
"""

from jaxrl_post.config.fields import any_of_type, at_least, file_path, mapping, on, one_of
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
from jaxrl_post.config.teaching import TeacherConfig
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
    "at_least",
    "check_place",
    "chosen",
    "default",
    "file_path",
    "load",
    "mapping",
    "on",
    "one_of",
    "refuse_url",
    "resolve",
    "to_dict",
]
