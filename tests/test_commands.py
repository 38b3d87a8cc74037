"""python -m jaxrl_post COMMAND: each command is the module that it names."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from jaxrl_post import __main__ as commands
from jaxrl_post.launch import command_line

ROOT = Path(__file__).resolve().parents[1]


def test_without_a_command_all_are_listed(capsys):
    assert commands.main([]) == 0 == commands.main(["--help"])
    text = capsys.readouterr().out
    assert all(len(re.findall(rf"^ *{name} ", text, re.MULTILINE)) == 2 for name in commands.COMMANDS)


def test_an_unknown_command_is_one_sentence(capsys):
    assert commands.main(["trian"]) == 1
    assert capsys.readouterr().err == (
        "error: unknown command 'trian'; nearest is 'train', all are train, simulate, options, evaluate, generate, "
        "serve, export, rollouts, compare, replay, report, fetch, watch, reward_check, launch, jetstream, tinker\n"
    )


def test_options_of_a_section_and_of_none(capsys):
    assert commands.main(["options", "sampling"]) == 0 == commands.main(["options"])
    text = capsys.readouterr().out
    assert "sampling.temperature" in text and "--help SECTION" in text
    assert commands.main(["options", "samplign"]) == 1
    assert "nearest is 'sampling'" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["options", "simulate", "rollouts", "compare", "replay", "report", "watch"])
def test_a_command_without_a_device_loads_no_jax(command):
    runs = {"rollouts": ["."], "compare": [".", "."], "replay": [".", "--rollout=a:0:0"]}
    flags = (runs | {"options": ["engine"], "simulate": ["--confg=x"]}).get(command, ["no_run"])
    code = (
        "import sys\nfrom jaxrl_post.__main__ import main\nmain(sys.argv[1:])\n"
        "sys.exit(sum(name in sys.modules for name in ('jax', 'flax', 'optax')))"
    )
    done = subprocess.run([sys.executable, "-c", code, command, *flags], cwd=ROOT, capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr.decode()


def test_train_is_the_run(capsys):
    assert commands.main(["train", "--confg=x"]) == 1
    assert "unknown argument '--confg=x'; nearest is --config=FILE" in capsys.readouterr().err


def test_values_after_a_sign_or_a_space_and_switches():
    known = ("--config=FILE", command_line.OVERRIDE, "--json FILE", "--quick")
    assert command_line.read(["--json", "a", "--config=b=c", "--quick", "--config.d.e=f=g", "--json=h"], known) == [
        ("--json", "a"),
        ("--config", "b=c"),
        ("--quick", ""),
        (command_line.OVERRIDE, "d.e=f=g"),
        ("--json", "h"),
    ]
    for wrong in ("--config", "--config=", "--json", "--quick=1", "quick"):
        with pytest.raises(ValueError, match="unknown argument"):
            command_line.read([wrong], known)
