"""The page report.html: its data are the run's logs, and no text of a run can leave the data."""

from __future__ import annotations

import html.parser
import json
import re

import made_run
import pytest

from jaxrl_post.runs import metric_rows, rollout_log
from jaxrl_post.runs.run_logs import opened
from jaxrl_post.telemetry import report
from jaxrl_post.telemetry.page import document

BREAKING = "</script><script>x=1</script><!--&amp;"


class Elements(html.parser.HTMLParser):
    """Collects script elements as a browser would cut them: (type, text)."""

    def __init__(self):
        super().__init__()
        self.scripts, self.tags = [], []

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag == "script":
            self.scripts.append([dict(attributes).get("type", ""), ""])

    def handle_data(self, data):
        if self.tags and self.tags[-1][0] == "script" and self.scripts:
            self.scripts[-1][1] += data


def read(page: str) -> tuple[dict, Elements]:
    found = Elements()
    found.feed(page)
    (data,) = [text for kind, text in found.scripts if kind == "application/json"]
    return json.loads(data), found


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return made_run.make(tmp_path_factory.mktemp("runs") / "made-3-001", planted="needle<b>")


@pytest.fixture(scope="module")
def told(run):
    (one,) = read(document.page(document.data([run])))[0]["runs"]
    return one


def test_curves_are_the_rows_of_metrics(run, told):
    rows, curves = metric_rows.read(run / "metrics.jsonl"), told["curves"]
    assert curves["steps"] == [0, 1, 2, 3] and curves["all"] == 4
    for name, values in curves["metrics"].items():
        given = {row["step"]: row[name] for row in rows if name in row and row[name] == row[name]}
        assert {step: v for step, v in zip(curves["steps"], values) if v is not None} == pytest.approx(given, rel=1e-6)
    assert set(curves["metrics"]) == {name for row in rows for name in row} - {"step"}
    assert curves["metrics"]["actor/grad_norm"] == [None, None, None, None]  # it was not finite


def test_time_is_that_of_the_report_and_adds_up_to_the_steps(run, told):
    times = told["times"]
    assert times["first"] == times["last"] == [1, 2, 3]
    assert times["shares"] == pytest.approx(report.device_time(metric_rows.read(run / "metrics.jsonl")))
    for bar in range(3):
        assert sum(values[bar] for values in times["seconds"].values()) == pytest.approx(10.0)
    assert times["seconds"]["training"] == pytest.approx([3.0, 3.0, 3.0])


def test_lengths_are_those_of_the_log(run, told):
    """Answers of 8 tokens, of 2 ("b" and its end), and two "a" runs a step. 2 and 3 tokens have bins of their own."""
    lengths, counted = told["lengths"], {}
    assert lengths["steps"] == [1, 2, 3] == opened(run).steps("train")
    for step, counts in zip(lengths["steps"], lengths["counts"]):
        given = [len(r) for g in rollout_log.read(run / f"rollouts/step_{step:06d}.npz") for r in g.rollouts]
        counted[step] = [
            sum(low <= n < high for n in given) for low, high in zip(lengths["edges"], lengths["edges"][1:])
        ]
        assert counts == counted[step] and sum(counts) == len(given) == 4
    assert counted[1][0] == 3  # 2 tokens each


def test_every_rollout_is_told_as_it_was_logged(run, told):
    logged = {
        (step, group.prompt.id, rollout.id.sample): (group, rollout, i)
        for step in opened(run).steps("train")
        for group in opened(run).groups("train", step)
        for i, rollout in enumerate(group.rollouts)
    }
    assert (
        len(told["rollouts"])
        == len(logged)
        == 12
        == told["rule"]["all"]["training"]
        == told["rule"]["shown"]["training"]
    )
    for one in told["rollouts"]:
        group, rollout, i = logged[one["step"], one["id"], one["sample"]]
        assert one["reward"] == group.rewards[i] and one["truth"] == group.prompt.answer and one["finish"] == "eos"
        assert one["logprobs"] == pytest.approx(rollout.logprobs.tolist()) and one["length"] == len(rollout)
        assert one["entropies"] == pytest.approx(rollout.entropies.tolist())
        assert one["versions"] == [[0, one["step"] - 1]] and one["drafted"] == [1] and one["forced"] == []
    answers = {"".join(one["text"]) for one in told["rollouts"]}
    assert {"answer1<eos>", "answer2<eos>", "needle<b><eos>", "aaa<eos>"} <= answers
    assert {one["prompt"] for one in told["rollouts"]} == {"ask0=", "ask1="}


def test_texts_of_a_run_cannot_leave_the_data(tmp_path):
    run = made_run.make(tmp_path / "a<i>b&", planted="")
    config = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps(config | {"name": BREAKING, "separators": "\u2028\u2029"}))
    page = document.write([run], tmp_path / "page.html").read_text(encoding="utf-8")
    told, found = read(page)
    assert told["runs"][0]["config"]["name"] == BREAKING
    assert [kind for kind, _ in found.scripts] == ["application/json", ""] and "x=1" not in found.scripts[1][1]
    assert "\u2028" not in page and page.count("</script>") == 2 and "<title>jaxrl_post: a&lt;i>b&amp;</title>" in page


def test_the_page_needs_no_other_file_and_writes_no_markup_from_data(told, run):
    page = document.page(document.data([run]))
    _, found = read(page)
    assert not [tag for tag, given in found.tags if given.get("src") or (tag == "link" and given["href"] != "data:,")]
    scripts = found.scripts[1][1]
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|fetch\(|https?://(?!www\.w3\.org)", scripts
    )
    (policy,) = [given["content"] for tag, given in found.tags if given.get("http-equiv") == "Content-Security-Policy"]
    assert policy.startswith("default-src 'none';")


def test_several_runs_have_names_of_their_own_and_share_the_page(tmp_path):
    runs = [made_run.make(tmp_path / where / "run", steps=2) for where in ("x", "y")]
    told = document.data(runs)
    assert [run["name"] for run in told["runs"]] == ["x/run", "y/run"]


@pytest.mark.parametrize(
    "given, words",
    [
        ((), "a report has 1 to 8 runs, 0 were named"),
        (("none",), "there is no such folder"),
        (("empty",), "has no config.json (it holds nothing)"),
        (("run", "run"), "was named twice"),
        (("run", "cut"), "step_000001.npz is no rollout log, or is damaged"),
    ],
)
def test_what_is_no_run_is_one_sentence_and_no_page_is_written(tmp_path, given, words):
    made_run.make(tmp_path / "run", steps=1)
    cut = made_run.make(tmp_path / "cut", steps=1) / "rollouts" / "step_000001.npz"
    cut.write_bytes(cut.read_bytes()[:-100])
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError) as caught:
        document.write([tmp_path / name for name in given], tmp_path / "page.html")
    assert words in str(caught.value) and "\n" not in str(caught.value)
    assert not [*tmp_path.glob("page*")]


def test_a_run_that_goes_on_has_a_page(tmp_path):
    run = made_run.make(tmp_path / "run", ended=False)
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": 4, "critic/sc')  # a row that is being written
    (told,) = document.data([run])["runs"]
    assert told["curves"]["steps"] == [0, 1, 2, 3] and told["summary"] == {}
