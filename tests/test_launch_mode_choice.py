"""scheduler.name=auto: the mode that is fastest for a reason computed by hand, the same one every time, never chosen anew."""

import json
import shutil

import pytest
from config_arms import error, given
from test_main import CONFIG, REWARD, write_sums
from test_sim_trial import LENGTHS, job

from jaxrl_post import config
from jaxrl_post import main as command
from jaxrl_post.launch.plan import mode_choice
from jaxrl_post.simulate import settings

AUTO = ("scheduler.name=auto", "steps=400", "scheduler.prompts=4", "scheduler.group_size=2", "sampling.max_tokens=64")
SAME = ((10, 10),) * 20


@pytest.fixture(autouse=True)
def briefly(monkeypatch):
    """Trials of fewer rollouts: these workloads are simple."""
    monkeypatch.setattr(mode_choice, "ROLLOUTS", 400)


def resolved(*overrides: str) -> config.Config:
    return config.resolve(given(), [*AUTO, *overrides])


def chosen(*overrides: str, **about) -> dict:
    return mode_choice.choose(resolved(*overrides), job(**about))


def seconds(why: dict) -> dict[str, float]:
    return {mode_choice.named(mode["options"]): mode["seconds"] for mode in why["modes"]}


# ---- choices known by hand


def test_equal_rollouts_in_full_slots_leave_nothing_to_gain():
    """Eight slots and rounds of eight rollouts: a synchronous round takes 10 s. In a short round the fifth group gets no
    slot before the race is over, and a pipeline fills the same slots. All modes are equal, so the simplest one stays."""
    why = chosen("scheduler.max_staleness=4", lengths=SAME, slots=8)
    found = seconds(why)
    assert why["chosen"] == {"name": "sync"} and found["sync"] == 10.0
    assert found["tail_batching over=1.25 prefix_mode=recompute"] == 10.0
    assert found["pipeline ahead=8"] == pytest.approx(10.0, rel=0.03)


def test_a_long_tail_and_no_stale_tokens_are_for_tail_batching():
    """Every fifth prompt is four times as long, and slots are free: a synchronous round nearly always waits for it."""
    why = chosen(lengths=LENGTHS)
    assert why["chosen"]["name"] == "tail_batching" and why["chosen"]["prefix_mode"] == "verify"
    assert list(why["left_out"]) == ["pipeline"] and all(mode["oldest"] == 0 for mode in why["modes"])
    assert seconds(why)[mode_choice.named(why["chosen"])] < 0.9 * seconds(why)["sync"]


def test_a_long_tail_in_few_slots_is_for_a_pipeline():
    """Full slots take the mean length, 16 tokens, for each round. Rounds take the longest."""
    why = chosen("scheduler.max_staleness=8", lengths=LENGTHS, slots=8)
    assert why["chosen"] == {"name": "pipeline", "ahead": 8}  # twice engine.refill_slots=4
    assert seconds(why)["pipeline ahead=8"] == pytest.approx(16, rel=0.15)


def test_only_modes_within_the_staleness_bound_are_candidates():
    """Tokens of a group that waits for a long round are as old as the short rounds between: four with 1.25, two with 1.5."""
    for most, modes in ((0, ["verify", "verify"]), (2, ["verify", "recompute"]), (4, ["recompute", "recompute"])):
        why = chosen(f"scheduler.max_staleness={most}", lengths=LENGTHS)
        assert [mode["options"].get("prefix_mode") for mode in why["modes"][1:3]] == modes
        assert all(mode["oldest"] <= most for mode in why["modes"])
        assert ("pipeline ahead=8" in seconds(why)) == (most > 0)
    apart = chosen("scheduler.max_staleness=4", "mesh.engine=1", lengths=LENGTHS)
    assert [mode["options"].get("prefix_mode") for mode in apart["modes"][1:3]] == ["verify", "recompute"]
    assert max(mode["oldest"] for mode in apart["modes"]) <= 4


def test_what_the_rules_refuse_is_no_candidate():
    found, left_out = mode_choice.candidates(resolved("scheduler.max_staleness=2", "scheduler.mini_batches=2"))
    assert "publishes after every optimizer step" in left_out["pipeline ahead=8"] and len(found) == 3
    found, left_out = mode_choice.candidates(resolved("scheduler.max_staleness=2", "engine.sleep=true"))
    assert "rollouts run on" in left_out["pipeline ahead=8"]


def test_a_short_run_is_simulated_whole():
    """Three steps: the second short round of tail batching already takes all that is left."""
    why = chosen("steps=3", lengths=SAME, slots=8, step_s=1.0)
    assert seconds(why)["sync"] == 11.0


def test_a_large_job_is_simulated_as_a_part_of_itself():
    """2,048 rollouts a round in 2,048 slots: of equal length they take 10 s, and training 2,048 * 14 tokens."""
    large = ("scheduler.prompts=1024", "engine.slots=2048", "engine.row_sizes=[2048]")
    why = chosen(*large, lengths=SAME, slots=2048, token_s=1e-3)
    assert seconds(why)["sync"] == pytest.approx(10 + 2048 * 14e-3)


# ---- the same every time


def test_a_choice_repeats_itself_and_reads_no_clock(monkeypatch):
    one = chosen("scheduler.max_staleness=4", lengths=LENGTHS)
    for clock in ("time", "monotonic", "perf_counter", "process_time"):
        monkeypatch.delattr(f"time.{clock}")
    assert json.dumps(chosen("scheduler.max_staleness=4", lengths=LENGTHS)) == json.dumps(one)


def test_the_table_says_why():
    words = mode_choice.text(
        chosen(lengths=LENGTHS) | {"lengths": mode_choice.observed.Observed(lengths=LENGTHS, source="made").told}
    ).splitlines()
    assert words[0] == "scheduler.name=auto: predicted seconds of an optimizer step, by simulation"
    assert "lengths of 40 rollouts (made): mean 16, median 10, 90 % within 40, longest 40 tokens" in words[1]
    assert [line.split()[0] for line in words[4:7]] == ["sync", "tail_batching", "tail_batching"]
    assert words[7] == "  not a choice: pipeline: scheduler.max_staleness=0 allows no token of older weights"
    assert words[8].startswith("  chosen: tail_batching over=1.")


# ---- refusals


def test_options_of_a_mode_are_part_of_the_choice():
    assert "scheduler.over=1.25 would be ignored" in error("scheduler.name=auto", "scheduler.over=1.25")
    assert "scheduler.auto_history='runs/a' would be ignored" in error("scheduler.auto_history=runs/a")
    sentence = error("scheduler.name=auto", "engine.name=demonstrations", "algorithm.loss_mode=sft")
    assert "scheduler.name='auto' needs rollouts that take their time" in sentence or "sft" in sentence
    with pytest.raises(ValueError, match="scheduler.name='auto' chooses among simulations, and this is one"):
        settings.resolve(settings.default(), ["scheduler.name=auto"])


# ---- runs


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """The run of test_main with a mode to be chosen, by a trace with a long tail. It has been run for a period of tail batching."""
    folder = tmp_path_factory.mktemp("auto")
    write_sums(folder, 4, 5, trained=20)
    (folder / "reward.py").write_text(REWARD)
    (folder / "toy.py").write_text(CONFIG.format(here=folder))
    records = [{"prompt": str(i), "output_length": 8 if i % 5 == 0 else 1} for i in range(20)]
    (folder / "lengths.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    table = {"step_s": {"32": 1.0}, "train_token_s": 1e-6}  # nothing but engine steps takes time
    (folder / "cost.json").write_text(json.dumps({"figures": table}))
    assert go(folder, "--run-dir", folder / "run", "steps=5") == 0
    return folder


def go(here, flag: str, folder, *overrides: str) -> int:
    more = (
        *("eval=default", "eval.prompts=0", "checkpoint.every=2", "engine.slots=32", "scheduler.name=auto"),
        f"scheduler.auto_history={here / 'lengths.jsonl'}",
        f"engine.cost_table={here / 'cost.json'}",
        *overrides,
    )
    options = [f"--config.{option}" for option in more]
    return command.main([f"--config={here / 'toy.py'}", f"{flag}={folder}", *options])


def told(folder) -> dict:
    return json.loads((folder / "config.json").read_text())


@pytest.mark.usefixtures("quick_compilation")
def test_a_run_has_the_chosen_mode_and_keeps_it(here, tmp_path, monkeypatch, capsys):
    """Gone lengths and a lost config.json change nothing. Under another cost table the engine does not go on at all."""
    before = told(here / "run")
    why = before["derived"]["auto"]
    assert before["scheduler"]["name"] == why["chosen"]["name"] == "tail_batching"
    assert before["scheduler"]["auto_history"] == "" and why["lengths"]["mean"] == 2.4

    def never(*_):
        raise AssertionError("chosen anew")

    monkeypatch.setattr(mode_choice, "choose", never)
    monkeypatch.setattr(mode_choice.observed, "read", never)
    for name in ("kept", "lost"):
        place = tmp_path / name
        shutil.copytree(here / "run", place)
        if name == "lost":
            for path in [*place.glob("*.json"), place / "policy", place / "report.html"]:  # as if it had been killed
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        capsys.readouterr()
        assert go(here, "--resume", place, "steps=6", "scheduler.auto_history=/gone") == 0
        assert "this run has its mode already: tail_batching over=" in capsys.readouterr().out
        after = told(place)
        assert after["scheduler"] == before["scheduler"] and after["derived"]["auto"] == why
        abouts = [json.loads(file.read_text()) for file in place.glob("checkpoints/step_*/about.json")]
        assert len(abouts) > 1 and all(about["auto"] == why for about in abouts)

    first = (here / "cost.json").read_text()
    (here / "cost.json").write_text('{"figures": {"step_s": {"32": 1e-6}, "train_token_s": 9.0}}')
    assert go(here, "--resume", tmp_path / "kept", "steps=7") == 1
    assert "the run was saved under cost table" in capsys.readouterr().err
    (here / "cost.json").write_text(first)


def test_lengths_that_are_not_there_leave_no_folder(here, tmp_path, capsys):
    assert go(here, "--run-dir", tmp_path / "run", "scheduler.auto_history=/gone") == 1
    assert "scheduler.auto_history=/gone: no trace and no rollout log is there" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_record_that_cannot_be_read_is_one_sentence(here, tmp_path, capsys):
    shutil.copytree(here / "run", tmp_path / "run")
    for text, words in (("{", "cannot be read"), ('{"steps": 2}', "does not say which scheduler the run has")):
        (tmp_path / "run" / "config.json").write_text(text)
        assert go(here, "--resume", tmp_path / "run") == 1
        assert words in capsys.readouterr().err
