"""python -m jaxrl_post COMMAND: each command is the module that it names."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from jaxrl_post import __main__ as commands
from jaxrl_post.config import command_line

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


@pytest.mark.parametrize(
    "words, wanted",
    [
        ("--json a --config=b=c", {"json": "a", "config": ["b=c"]}),
        ("--config b --config=c", {"config": ["b", "c"]}),
        ("--quick --config.d.e=f=g --config.h -1", {"quick": True, "overrides": ("d.e=f=g", "h=-1")}),
        ("--mark", {"mark": ""}),
        ("--mark=x", {"mark": "x"}),
        ("--config.a --quick", {"quick": True, "overrides": ("a",)}),
        ("--token=", {"token": ""}),
    ],
)
def test_values_after_a_sign_or_a_space_and_switches(words, wanted):
    unset = {"config": [], "json": "", "quick": False, "mark": None, "token": None, "overrides": ()}
    found = vars(_parser().read(words.split()))
    assert {name: found[name] for name in unset} == unset | wanted


@pytest.mark.parametrize("wrong", ["--json", "--json=", "--quick=1", "quick", "--jso=a", "--mark=", "--mark=x --mark"])
def test_a_wrong_word_is_one_sentence(wrong):
    with pytest.raises(ValueError, match="unknown argument .*; nearest is --|ignored explicit|given twice") as caught:
        _parser().read(wrong.split())
    assert "\n" not in str(caught.value)


def _parser():
    forms = ("--config=FILE ...", command_line.OVERRIDE, "--json=FILE", "--quick", "--mark[=X]")
    flags = [command_line.Flag(form, "is 100 % right") for form in forms]
    flags.append(command_line.Flag("--token=TOKEN", "may be empty", default=None))
    return command_line.Arguments("", "python -m x\n\nDoes.", flags)


@pytest.mark.parametrize("command", commands.COMMANDS)
def test_the_help_of_every_command_says_its_use_and_each_of_its_flags(command, capsys):
    try:
        assert commands.main([command, "--help"]) == 0
    except SystemExit as ended:
        assert ended.code == 0
    text = capsys.readouterr().out
    assert re.match(rf"usage: python -m jaxrl_post[ .]({command}|main) ", text)
    assert "-h, --help" in text and not re.findall(r"^  --[\w-]+(?: \S+)?$", text, re.MULTILINE)  # a flag without words


def test_there_is_one_parser():
    """Every flag of the package goes through Arguments, and only programs read the words of the shell."""
    sources = {path.relative_to(ROOT).as_posix(): path.read_text() for path in ROOT.glob("jaxrl_post/**/*.py")}
    found = {
        name for name, text in sources.items() if re.search(r"class \w+\(.*ArgumentParser\)|getopt|optparse", text)
    }
    assert found == {"jaxrl_post/config/command_line.py"}
    assert {name for name, text in sources.items() if "sys.argv" in text} == {
        "jaxrl_post/__main__.py",
        "jaxrl_post/main.py",
        "jaxrl_post/simulate/__main__.py",
        "jaxrl_post/config/reference.py",  # writes a page
        "jaxrl_post/launch/jobs/local.py",  # starts the processes of a local job, which no user calls
    }
