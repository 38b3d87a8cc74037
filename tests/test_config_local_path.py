"""A URL is refused wherever a user may name a path: options, flags, variables, commands. A run's bucket alone is not."""

from __future__ import annotations

import pytest
from config_arms import error
from refusals import refused

from jaxrl_post import config
from jaxrl_post.commands import replay
from jaxrl_post.config import fields, refuse_url
from jaxrl_post.launch.command_line import parse
from jaxrl_post.launch.compile_guard import use_cache
from jaxrl_post.simulate import settings, simulation

BUCKET = "gs://bucket/runs"
NEAR = "is a URL, and here a local path is needed: .* for example /mnt/bucket/runs"


@pytest.mark.parametrize(
    "url, near",
    [
        (BUCKET, "/mnt/bucket/runs"),
        ("gs:/bucket/runs", "/mnt/bucket/runs"),
        ("s3://b/x y", "/mnt/b/x y"),
        ("anything://b", "/mnt/b"),
        ("file:///data/runs", "/data/runs"),
        ("HTTPS://host/a.jsonl", "/mnt/host/a.jsonl"),
    ],
)
def test_a_url_is_refused_with_a_local_path(url, near):
    with pytest.raises(ValueError) as refused:
        refuse_url(url, "run_dir")
    assert str(refused.value).startswith(f"run_dir={url!r} is a URL") and str(refused.value).endswith(f" {near}")


@pytest.mark.parametrize(
    "path", ["", "runs", "/a/b", "./gs:/x", "task:sums", "a.b:c", "my file.py:fn", r"C:\runs", "a:b"]
)
def test_paths_and_names_pass(path):
    refuse_url(path, "run_dir")


@pytest.mark.parametrize(
    "name", ["run_dir", "model.path", "model.tokenizer", "data.train", "eval.data", "engine.cost_table"]
)
def test_every_option_that_is_a_path_refuses_it(name):
    url = "s3://bucket/runs" if name == "run_dir" else "https://host/runs"
    assert error(f"{name}={url}").startswith(f"config: {name}={url!r} is a URL")


def test_files_that_are_read_may_lie_in_a_bucket():
    found = [option.name for option in fields.options(config.Config) if option.about.bucket]
    assert found == ["model.path", "model.tokenizer", "engine.cost_table", "lora.adapter", "data.train", "reward.model",
                     "eval.data"]  # fmt: skip
    for name in found:
        for scheme in ("gs", "s3"):
            assert error(f"{name}={scheme}://bucket").startswith(
                f"config: {name}='{scheme}://bucket' is no place in a bucket: write {scheme}://"
            )
        assert error(f"{name}=nowhere://bucket/x").startswith(
            f"config: {name}='nowhere://bucket/x': nothing here reads nowhere://; write gs://"
        )
    for url in ("gs://bucket/a.jsonl", "s3://bucket/a.jsonl"):
        given = config.resolve(config.default(), ["model.preset=tiny", f"data.train={url}", "eval.prompts=0"])
        assert given.data.train == url
    for name in ("run_dir", "reward.functions"):
        assert error(f"{name}={BUCKET}" if name == "run_dir" else f"{name}=['{BUCKET}']").startswith(f"config: {name}=")


def test_each_of_several_paths_is_checked():
    assert "config: reward.functions='s3://b/x.py:f' is a URL" in error("reward.functions=['a.b:c','s3://b/x.py:f']")


def test_the_options_that_are_paths_are_these():
    found = [option.name for schema in (config.Config, settings.Simulation) for option in fields.options(schema)
             if option.about.path]  # fmt: skip
    assert found == [
        "run_dir", "model.path", "model.tokenizer", "engine.cost_table", "scheduler.auto_history", "critic.path", "teacher.path",
        "lora.adapter", "data.train", "data.sources", "reward.functions", "reward.model",
        "judge.model", "environment.name", "eval.data",
        "workload.path", "cluster.cost_table", "scheduler.auto_history",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "ask",
    [
        lambda: parse([f"--config={BUCKET}"]),
        lambda: parse(["--config=configs/demo.py", f"--branch={BUCKET}"]),
        lambda: parse(["--config=configs/demo.py", "--run-dir=https://bucket/runs"]),
        lambda: parse(["--config=configs/demo.py", "--resume=https://bucket/runs"]),
        lambda: use_cache({"JAX_COMPILATION_CACHE_DIR": "https://bucket/runs"}),
        lambda: use_cache({"XDG_CACHE_HOME": BUCKET}),
        lambda: simulation.parse(["--json", BUCKET]),
        lambda: simulation.parse(["--trace", BUCKET]),
        lambda: config.load(BUCKET),
    ],
)
def test_flags_and_variables_refuse_it(ask):
    refused(NEAR, ask)


@pytest.mark.parametrize("url", [BUCKET, "s3://bucket/runs", "az://bucket/runs"])
def test_a_run_may_lie_in_a_bucket(url):
    assert parse(["--config=configs/demo.py", f"--run-dir={url}"]).run_dir == url
    assert parse([f"--resume={url}"]).run_dir == url
    refused(r"--resume='gs://bucket' is no place in a bucket: write gs://BUCKET/NAME", parse, ["--resume=gs://bucket"])


def test_a_command_refuses_it(capsys):
    assert replay.main([BUCKET, "--batch=1"]) == 1
    assert "RUN='gs://bucket/runs' is a URL" in capsys.readouterr().err
