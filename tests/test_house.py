"""The house rules of the design, checked from the sources; and each check fails on a planted violation.

A rule that bites is met by changing the code. The tables below hold the few exceptions, each with its reason; an entry
whose case is gone fails too.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import contracts
import house
import pytest
import weights

from jaxrl_post import config

ROOT = Path(__file__).resolve().parents[1]

LONG_FILES: dict[str, str] = {}
LONG_FUNCTIONS: dict[str, str] = {}
CROWDED = {"kernels": "a kernel has one file for each platform, and one for what they share"}  # folders of many files
WIDE: dict[str, str] = {}  # public functions of many parameters
LONE_HELPERS = 295  # private functions with one caller into which they would fit; none may be added
RUN_LEVEL = {  # config values that no file in configs/ needs to set
    "name": "a file's recipe has one, a second run of it gets another by --config.name",
    "run_dir": "where runs go is the user's choice, by --config.run_dir",
    "seed": "a recipe holds for every seed; --config.seed chooses",
    "algorithm.router_replay_reference": "whether a reference chooses its own experts is a matter of the user's experiment",
    "engine.uncorrected": "whether rollouts of 8 bits may go uncorrected is a matter of the user's experiment",
    "engine.one_graph": "whether one CUDA graph is faster is a matter of the user's GPU, and no GPU has measured it yet",
    "sampling.keep_routes": "whether routes are worth their bytes is a matter of the user's model and memory",
    "reward.test_limit_s": "of programs judged without adaptive_limit, which the one config that judges programs has on",
    "environment.tool_calls": "follows the family of a user's model; the demos' small policy writes no calls",
    "reward.skip_special_tokens": "which tags are special tokens is a matter of the user's tokenizer",
    "reward.sandbox": "auto takes the strictest level that a host gives; which one a host needs is its owner's to say",
    "environment.cut_turns": "whether a turn without its end can be judged is a matter of the user's environment",
    "judge.asleep": "whether a judge fits beside the policy is a matter of the user's devices; the demo's does",
    "data.system_prompt": "the words in front of a user's conversations are his own",
    "data.chat_template_kwargs": "which names a template reads is a matter of the user's model",
    "data.date": "a run whose template asks for the date sets it at its start",
    "lora.adapter": "which adapter a run starts from is the user's choice, by --config.lora.adapter",
    "engine.cost_table": "a measured table is of one machine; who has measured his own names it by --config.engine.cost_table",
    "logger.console": "how much of a run a user wants to read is his choice",
    "logger.tensorboard": "which viewer a user has is his choice; a recipe that asked for an extra would not start without it",
    "logger.wandb": "as logger.tensorboard, and it may need an account",
    "logger.project": "names a user's project at Weights & Biases",
    "logger.name": "names a user's run at Weights & Biases",
}
OF_PAPERS = {  # values whose default is the paper's own, so that the recipe that names it changes nothing
    "scheduler.max_waves": "recipes/dapo",
    "algorithm.overlong_penalty": "recipes/dapo",
    "algorithm.gamma": "recipes/reinforce_plus_plus",
    "algorithm.kl_coef": "recipes/reinforce_plus_plus",
    "algorithm.tau_pos": "recipes/sapo",
    "algorithm.tau_neg": "recipes/sapo",
    "algorithm.kl_loss_type": "recipes/grpo",
    "algorithm.rollout_is_threshold": "recipes/cispo",
    "optimizer.b1": "demo",
}
RULES = {
    f.__name__: f
    for f in (
        house.unknown_rooms,
        house.upward_imports,
        house.cycles,
        house.own_imports,
        house.proxies,
        house.first_level,
        house.host_imports,
        house.loop_imports,
        house.config_dicts,
        house.config_order,
        house.forbidden_names,
        house.type_checking,
        house.broad_excepts,
        house.simulator_in_scheduler,
        house.partition_specs,
        house.package_folders,
    )
}


@pytest.fixture(scope="module")
def tree() -> house.Tree:
    return house.Tree(ROOT)


@pytest.mark.parametrize("rule", RULES)
def test_the_project_keeps(tree, rule):
    assert not RULES[rule](tree)


def test_long_files_have_a_reason(tree):
    assert not house.unsettled(house.long_files(tree), LONG_FILES)


def test_long_functions_have_a_reason(tree):
    assert not house.unsettled(house.long_functions(tree), LONG_FUNCTIONS)


def test_folders_of_many_files_and_wide_signatures_have_a_reason(tree):
    assert not house.unsettled(weights.crowded_folders(tree), CROWDED)
    assert not house.unsettled(weights.wide_signatures(tree), WIDE)


def test_helpers_with_one_caller_do_not_grow(tree):
    found = weights.lone_helpers(tree)
    assert len(found) <= LONE_HELPERS, f"{len(found)} private functions with one caller: {found}"


def test_host_rooms_load_no_jax(tree):
    """By really importing them: what a dependency drags in counts."""
    modules = [m for m in tree.modules if house.under(m, house.HOST)]
    assert "jaxrl_post.ring.types" in modules
    assert not _loaded_devices(ROOT, modules)


def _loaded_devices(root: Path, modules: list[str]) -> str:
    """The device libraries that importing the modules one by one loads, with the first module that does it."""
    code = (
        "import importlib, sys\nfor name in sys.argv[1:]:\n    importlib.import_module(name)\n"
        f"    bad = sorted({house.DEVICE_LIBRARIES!r} & set(sys.modules))\n"
        "    if bad: sys.exit(f'{name} loads {bad}')"
    )
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", code, *modules], cwd=root, env=env, capture_output=True, text=True, timeout=120
    )
    return done.stderr.strip() if done.returncode else ""


def test_every_protocol_method_is_called(tree):
    if "jaxrl_post.main" not in tree.modules:
        pytest.skip("jaxrl_post/main.py, which puts the callers together, is not there yet")
    assert not contracts.uncalled(tree)


def test_every_config_file_resolves():
    for file in _config_files():
        resolved = config.resolve(config.load(str(file)))
        assert isinstance(resolved, config.Config), file


def test_every_config_value_is_set_by_some_config_file():
    """To another value than its default: an assignment that changes nothing does not count, but for what OF_PAPERS names,
    where the recipe must say it all the same."""
    names, defaults, changed = contracts.leaves(config.Config), config.default().to_dict(), set()
    for file in _config_files():
        changed |= contracts.changed(config.load(str(file)).to_dict(), defaults, names)
    excused = {*RUN_LEVEL, *OF_PAPERS}
    assert not [name for name in names if name not in changed | excused]
    assert excused <= set(names) and not set(OF_PAPERS) & (changed | set(RUN_LEVEL))
    for name, recipe in OF_PAPERS.items():
        assert name in contracts.assigned(ROOT / "configs" / f"{recipe}.py"), f"{recipe} does not say {name}"


def test_every_config_value_is_read(tree):
    if "jaxrl_post.main" not in tree.modules:
        pytest.skip("jaxrl_post/main.py, which reads the config, is not there yet")
    assert not contracts.unread(tree, contracts.leaves(config.Config))


def _config_files() -> list[Path]:
    """Of runs: those in sim/ are simulations, and own/ holds a reward."""
    return sorted(file for file in (ROOT / "configs").rglob("*.py") if file.parent.name not in ("own", "sim"))


# Planted violations: (rule, files of a synthetic checkout, what the rule must name).
PLANTED = [
    ("unknown_rooms", {"jaxrl_post/hotel.py": ""}, "hotel"),
    (
        "upward_imports",
        {
            "jaxrl_post/engine/packing.py": "from jaxrl_post.trainer import compiled",
            "jaxrl_post/trainer/compiled.py": "",
        },
        "imports trainer",
    ),
    (
        "upward_imports",
        {"jaxrl_post/data/tasks.py": "def f():\n    import jaxrl_post.models.decoder as d"},
        "imports models",
    ),
    (
        "upward_imports",
        {"jaxrl_post/runs/journal.py": "from ..telemetry import metrics", "jaxrl_post/telemetry/metrics.py": ""},
        "imports telemetry",
    ),
    (
        "upward_imports",
        {"jaxrl_post/data/tasks.py": "from ..models import hf", "jaxrl_post/models/hf.py": ""},
        "imports models",
    ),
    (
        "upward_imports",
        {"kernels/attention.py": "from jaxrl_post.ring import loop", "jaxrl_post/ring/loop.py": ""},
        "imports ring",
    ),
    ("upward_imports", {"jaxrl_post/__init__.py": "from jaxrl_post.ring.types import Prompt"}, "imports ring"),
    (
        "upward_imports",
        {"jaxrl_post/engine/step_cost.py": "import importlib\nimportlib.import_module('jaxrl_post.main')"},
        "imports main",
    ),
    (
        "cycles",
        {
            "jaxrl_post/engine/a.py": "from jaxrl_post.engine import b",
            "jaxrl_post/engine/b.py": "from jaxrl_post.engine.c import x",
            "jaxrl_post/engine/c.py": "from .a import y",
        },
        "a -> jaxrl_post.engine.b",
    ),
    (
        "own_imports",
        {"jaxrl_post/engine/a.py": "from jaxrl_post.engine.a import f", "jaxrl_post/engine/__init__.py": ""},
        "engine.a imports itself",
    ),
    (
        "own_imports",
        {"jaxrl_post/engine/a.py": "from jaxrl_post.engine import a", "jaxrl_post/engine/__init__.py": ""},
        "engine.a imports itself",
    ),
    (
        "proxies",
        {"jaxrl_post/engine/a.py": "class Around:\n    def __getattr__(self, name): return getattr(self._it, name)"},
        "a.Around passes",
    ),
    ("first_level", {f"jaxrl_post/x{i}.py": "" for i in range(3)}, "4 modules"),
    ("host_imports", {"jaxrl_post/engine/host/replica.py": "import jax"}, "replica imports jax"),
    ("host_imports", {"jaxrl_post/rewards/pool.py": "def f():\n    import jax.numpy as jnp"}, "imports jax.numpy"),
    ("host_imports", {"jaxrl_post/scheduler/rounds/rounds.py": "from flax import nnx"}, "imports flax"),
    ("host_imports", {"jaxrl_post/engine/row_plan.py": "import numpy as np"}, "imports numpy"),
    (
        "loop_imports",
        {"jaxrl_post/ring/loop.py": "from jaxrl_post import config", "jaxrl_post/config.py": ""},
        "config",
    ),
    ("config_dicts", {"jaxrl_post/trainer/packing.py": "import ml_collections"}, "ml_collections"),
    ("config_dicts", {"jaxrl_post/config/schema.py": "import ml_collections"}, "config.schema imports ml_collections"),
    (
        "config_order",
        {
            "jaxrl_post/config/rules.py": "from jaxrl_post.config.schema import Config",
            "jaxrl_post/config/schema.py": "",
        },
        "rules imports schema",
    ),
    ("config_order", {"jaxrl_post/config/extra.py": ""}, "extra is not in the order"),
    ("forbidden_names", {"jaxrl_post/trainer/train_utils.py": ""}, "train_utils.py"),
    ("forbidden_names", {"jaxrl_post/core/x.py": ""}, "core"),
    ("forbidden_names", {"tests/helpers.py": ""}, "helpers"),
    (
        "type_checking",
        {"jaxrl_post/trainer/packing.py": "import typing\nif typing.TYPE_CHECKING:\n    import jax"},
        "trainer/packing.py:2",
    ),
    ("broad_excepts", {"jaxrl_post/trainer/packing.py": "try:\n    f()\nexcept:\n    pass"}, "trainer/packing.py:3"),
    ("broad_excepts", {"kernels/x.py": "try:\n    f()\nexcept (OSError, Exception):\n    pass"}, "x.py:3"),
    ("broad_excepts", {"scripts/x.py": "with contextlib.suppress(BaseException):\n    f()"}, "x.py:1"),
    ("simulator_in_scheduler", {"jaxrl_post/scheduler/rounds/rounds.py": "def admit(sim_engine): ..."}, "sim_engine"),
    (
        "simulator_in_scheduler",
        {"jaxrl_post/scheduler/rounds/rounds.py": "class EngineSimulator: ..."},
        "EngineSimulator",
    ),
    (
        "simulator_in_scheduler",
        {"jaxrl_post/scheduler/rounds/rounds.py": "from jaxrl_post.simulate import engine"},
        "imports",
    ),
    (
        "partition_specs",
        {"jaxrl_post/engine/row_program.py": "from jax.sharding import PartitionSpec as S"},
        "row_program.py:1",
    ),
    (
        "partition_specs",
        {"jaxrl_post/engine/row_program.py": "import jax\nx = jax.sharding.PartitionSpec('a')"},
        "row_program.py:2",
    ),
    ("partition_specs", {"jaxrl_post/engine/row_program.py": "import jax\nx = jax.P('a')"}, "row_program.py:2"),
    ("package_folders", {"jaxrl_post/simulate/engine.py": ""}, "simulate/ lacks"),
    ("package_folders", {"kernels/__init__.py": ""}, "must not exist"),
]


def _plant(root: Path, files: dict[str, str]) -> house.Tree:
    for name, text in {"jaxrl_post/__init__.py": "", **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return house.Tree(root)


@pytest.mark.parametrize("rule, files, named", PLANTED, ids=[f"{i}-{case[0]}" for i, case in enumerate(PLANTED)])
def test_a_planted_violation_is_found(tmp_path, rule, files, named):
    found = RULES[rule](_plant(tmp_path, files))
    assert any(named in sentence for sentence in found), found


def test_every_rule_has_a_planted_violation_and_passes_a_good_tree(tmp_path):
    assert {case[0] for case in PLANTED} == set(RULES)
    good = _plant(
        tmp_path,
        {
            "jaxrl_post/ring/__init__.py": "",
            "jaxrl_post/ring/types.py": "import numpy",
            "jaxrl_post/parallel/mesh.py": "from jax.sharding import PartitionSpec as P",
            "jaxrl_post/parallel/__init__.py": "",
            "jaxrl_post/scheduler/__init__.py": "",
            "jaxrl_post/scheduler/rounds/__init__.py": "",
            "jaxrl_post/scheduler/placement/__init__.py": "",
            "jaxrl_post/scheduler/rounds/rounds.py": '"""Drives the simulator too."""\n'
            "from jaxrl_post.ring.types import Prompt\nfrom jaxrl_post.scheduler import balance",
            "jaxrl_post/scheduler/placement/histopipe.py": "similar = 1\ntry:\n    f()\nexcept ValueError:\n    pass",
            "jaxrl_post/ring/loop.py": "from .types import Prompt",
            "jaxrl_post/main.py": "import ml_collections, jaxrl_post.ring.loop",
            "kernels/attention.py": "import jax",
        },
    )
    assert {name: rule(good) for name, rule in RULES.items() if rule(good)} == {}


def test_planted_lengths_are_found(tmp_path):
    body = "def f():\n    '''doc\n\n    more'''\n" + "    x = 1\n" * 59
    long = "class A:\n    def g(self):\n" + "        x = 1\n" * 60
    tree = _plant(
        tmp_path,
        {
            "jaxrl_post/trainer/packing.py": body,
            "jaxrl_post/engine/step_cost.py": long,
            "kernels/a.py": "x = 1\n" * 601,
        },
    )
    assert house.long_functions(tree) == {"jaxrl_post/engine/step_cost.py:A.g": 61}
    assert house.long_files(tree) == {"kernels/a.py": 601}
    assert (
        house.unsettled({"a": 401}, {})
        and house.unsettled({}, {"a": "why"})
        and not house.unsettled({"a": 1}, {"a": "w"})
    )


def test_a_host_room_that_drags_jax_in_is_found(tmp_path):
    _plant(
        tmp_path, {"jaxrl_post/engine/step_cost.py": "import planted_dependency", "planted_dependency.py": "import jax"}
    )
    assert "jaxrl_post.engine.step_cost loads ['jax'" in _loaded_devices(tmp_path, ["jaxrl_post.engine.step_cost"])


PROTOCOLS = """
class Engine(Protocol):
    def step(self): ...
    @property
    def clock(self): ...
class Learner(Protocol):
    def step(self): ...
"""


@pytest.mark.parametrize(
    "loop, missing",
    [
        ("def run(engine, learner):\n    engine.step(), engine.clock, learner.step()", []),
        ("def run(engine, learner):\n    engine.step(), learner.step()", ["Engine.clock"]),
        ("def run(engine, learner):\n    engine.step(), engine.clock", ["Learner.step"]),  # another protocol's step
        ("def run(machine: Engine):\n    machine.step(), machine.clock", ["Learner.step"]),
        ("def run(self):\n    for part in (self.engine, self.learner):\n        part.step()", ["Engine.clock"]),
        (
            "class Fake:\n    def step(self, engine): engine.step()\n    def clock(self): self.engine.clock",
            ["Engine.clock", "Engine.step", "Learner.step"],
        ),  # an implementation that only calls another one
    ],
)
def test_uncalled_protocol_methods_are_found(tmp_path, loop, missing):
    tree = _plant(tmp_path, {"jaxrl_post/ring/protocols.py": PROTOCOLS, "jaxrl_post/ring/loop.py": loop})
    assert [sentence.partition(":")[0] for sentence in contracts.uncalled(tree)] == missing


def test_config_values_that_nobody_sets_or_reads_are_found(tmp_path):
    names = contracts.leaves(config.Config)
    assert "engine.slots" in names and "data.task" in names and "engine" not in names
    file = tmp_path / "demo.py"
    file.write_text("def get_config():\n    c = default()\n    c.engine.slots = 4\n    c.data.task.digits = 3\n")
    assert {"engine.slots", "data.task"} <= contracts.assigned(file)
    assert not {"engine.pages", "steps"} & contracts.assigned(file)
    assert contracts.changed({"a": {"b": 1, "c": 2}}, {"a": {"b": 1, "c": 3}}, ["a.b", "a.c"]) == {"a.c"}
    tree = _plant(
        tmp_path,
        {
            "jaxrl_post/config/schema.py": "class C:\n    def p(self): return self.a.b\ndef rule(c): c.a.d",
            "jaxrl_post/main.py": "config.a.e",
        },
    )
    assert contracts.unread(tree, ["a.b", "a.d", "a.e"]) == ["a.d"]
