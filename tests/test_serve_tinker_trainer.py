"""Losses, gradients and steps of the Tinker API against plain formulas: dense, unpacked, and Adam in numpy's float64."""

from __future__ import annotations

import dataclasses

import gradient_arms as arms
import jax
import jax.numpy as jnp
import lora_arms
import made_groups
import numpy as np
import pytest
from dense_attend import dense
from safetensors.numpy import load_file, save_file

from jaxrl_post import config
from jaxrl_post.models import decoder
from jaxrl_post.parallel import mesh
from jaxrl_post.serve.schema import Refusal
from jaxrl_post.serve.tinker import programs as tinker_programs
from jaxrl_post.serve.tinker import trainer
from jaxrl_post.serve.tinker.losses import LOSSES
from jaxrl_post.serve.tinker.snapshots import Saved, Snapshot, Snapshots
from jaxrl_post.trainer import programs

pytestmark = pytest.mark.usefixtures("quick_compilation")

MODEL = made_groups.MODEL
SINGLE = 5e-6  # relative 2-norm of a leaf's gradient in float32
BOUNDS = {
    "cross_entropy": {},
    "importance_sampling": {},
    "ppo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
    "cispo": {"clip_low_threshold": 0.9, "clip_high_threshold": 1.05},
    "dro": {"beta": 0.3},
}
FIELDS = [one.name for one in dataclasses.fields(tinker_programs.Datum)]
ADAM = dict(learning_rate=0.01, beta1=0.9, beta2=0.95, eps=1e-12, weight_decay=0.1, grad_clip_norm=0.0)


def made(count: int = 7, seed: int = 0, longest: int = 20) -> list[tinker_programs.Datum]:
    """Datums whose targets are not the inputs moved by one, and whose ratios lie around 1."""
    rng, out = np.random.default_rng(seed), []
    for _ in range(count):
        n = int(rng.integers(1, longest + 1))
        floats = {name: rng.standard_normal(n).astype(np.float32) for name in ("weights", "advantages")}
        ids = rng.integers(0, MODEL.vocab_size, (2, n)).astype(np.int32)
        logprobs = (-3.5 + 0.3 * rng.standard_normal(n)).astype(np.float32)
        out.append(tinker_programs.Datum(tokens=ids[0], targets=ids[1], logprobs=logprobs, **floats))
    return out


def one_of(rows: int = 2, tokens: int = 24, sizes=(1, 1, 1), **how) -> trainer.Trainer:
    given = dict(temperature=1.0, remat=None, scan_layers="no", dtype="float32", attention=None) | how
    batch = config.BatchConfig(rows=rows, tokens=tokens, head_chunk=16)
    recipe = programs.recipe(
        MODEL, config.AlgorithmConfig(), config.OptimizerConfig(), batch, mesh.make_mesh(*sizes), **given
    )
    return trainer.Trainer(recipe, made_groups.weights(0), name="made", rows=rows, tokens=tokens)


def formula(loss: str, logps, one: tinker_programs.Datum, bounds):
    """The documentation's code, line by line, without the sum."""
    ratio, a = jnp.exp(logps - one.logprobs), one.advantages
    if loss == "cross_entropy":
        return -logps * one.weights
    if loss == "importance_sampling":
        return -(ratio * a)
    if loss == "dro":
        return -(logps * a - 0.5 * bounds["beta"] * (logps - one.logprobs) ** 2)
    held = jnp.where(ratio < bounds["clip_low_threshold"], bounds["clip_low_threshold"], ratio)
    held = jnp.where(held > bounds["clip_high_threshold"], bounds["clip_high_threshold"], held)
    if loss == "ppo":
        return -jnp.minimum(ratio * a, held * a)
    return -(jax.lax.stop_gradient(held) * logps * a)


def apart(given) -> tuple[tinker_programs.Datum, np.ndarray]:
    """One sequence in each row, [n, T], and which tokens there are."""
    T = max(map(len, given))
    pad = {name: np.stack([np.pad(getattr(one, name), (0, T - len(one))) for one in given]) for name in FIELDS}
    return tinker_programs.Datum(**pad), np.arange(T) < np.array([[len(one)] for one in given])


def plain_logprobs(params, rows: tinker_programs.Datum):
    """By a whole softmax over unpacked rows."""
    ids = jnp.asarray(rows.tokens)
    positions = jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)
    h, _ = decoder.hidden(params, MODEL, ids, positions, dense(positions), None, dtype=jax.tree.leaves(params)[0].dtype)
    logps = jax.nn.log_softmax(decoder.logits(params, MODEL, h))
    return jnp.take_along_axis(logps, jnp.asarray(rows.targets)[..., None], axis=-1)[..., 0]


def plain(loss: str, params, given):
    """The summed loss, its gradient, and the log-probs of every datum, in float64."""
    rows, there = apart(given)

    def total(p):
        logps = plain_logprobs(p, rows)
        return jnp.sum(jnp.where(there, formula(loss, logps, rows, BOUNDS[loss]), 0.0)), logps

    with arms.precision(np.float64):
        wide = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), params)
        (value, logps), slope = jax.jit(jax.value_and_grad(total, has_aux=True))(wide)
        return float(value), jax.device_get(slope), [row[mask] for row, mask in zip(np.asarray(logps), there)]


@pytest.fixture(scope="module")
def full():
    one = one_of()
    one.begin("run", None, 0)
    return one


def slope_of(one: trainer.Trainer, given, loss: str):
    one.runs["run"].sums = None
    found = one.forward_backward("run", given, loss, {name: np.float32(x) for name, x in BOUNDS[loss].items()})
    return found, jax.device_get(one.runs["run"].sums)


@pytest.mark.parametrize("loss", LOSSES)
def test_losses_and_gradients_of_all_weights(full, loss):
    given = made()
    found, slope = slope_of(full, given, loss)
    value, expected, scores = plain(loss, made_groups.weights(0), given)
    assert abs(found.total - value) < 1e-6 * sum(np.abs(one).sum() for one in found.losses)
    assert arms.worst(slope, expected) <= SINGLE
    again = full.forward("run", given, loss, {name: np.float32(x) for name, x in BOUNDS[loss].items()})
    for logps, same, score in zip(found.logprobs, again.logprobs, scores, strict=True):
        assert np.array_equal(logps, same) and np.allclose(logps, score, rtol=0, atol=2e-6)


def test_gradients_of_additions_are_those_of_the_explicit_model():
    given, one = made(seed=1), one_of(scan_layers="yes", remat="full")
    run = one.begin("run", lora_arms.PLAIN, 0)
    added = lora_arms.adapter(lora_arms.PLAIN, 2)
    run.weights = mesh.put(added, one._of(run.lora).homes)
    found, sums = slope_of(one, given, "ppo")
    scanned = dataclasses.replace(one._recipe.loop, scan=True)
    slope = programs.by_layer(sums, dataclasses.replace(one._recipe, loop=scanned))
    value, whole, _ = plain("ppo", lora_arms.merged(made_groups.weights(0), added, lora_arms.PLAIN), given)
    assert abs(found.total - value) < 1e-5
    assert arms.worst(jax.device_get(slope), lora_arms.chained(whole, added, lora_arms.PLAIN)) <= SINGLE


@pytest.mark.extended
def test_gradients_on_eight_devices():
    one = one_of(rows=4, sizes=(2, 2, 2))
    one.begin("run", None, 0)
    _, slope = slope_of(one, made(), "cispo")
    assert arms.worst(slope, plain("cispo", made_groups.weights(0), made())[1]) <= SINGLE


def test_the_bits_of_a_request_do_not_depend_on_other_requests(full):
    given = made()
    alone, slope = slope_of(full, given, "dro")
    full.begin("other", None, 0)
    full.forward_backward("other", made(seed=3), "cross_entropy", {})
    full.step("other", ADAM)
    again, same = slope_of(full, given, "dro")
    assert all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves((alone, slope)), jax.tree.leaves((again, same))))


@pytest.mark.parametrize("clip", [0.0, 0.5])
def test_steps_are_those_of_adam_in_numpy(clip):
    one, adam = one_of(), ADAM | {"grad_clip_norm": clip}
    run = one.begin("run", None, 0)
    p = jax.tree.map(np.float64, made_groups.weights(0))
    m, v = (jax.tree.map(np.zeros_like, p) for _ in range(2))
    for step in range(1, 4):
        one.forward_backward("run", made(seed=step), "cross_entropy", {})
        g = jax.tree.map(np.float64, jax.device_get(run.sums))
        norm = np.sqrt(sum(np.sum(x * x) for x in jax.tree.leaves(g)))
        assert abs(one.step("run", adam) - norm) < 1e-5 * norm
        g = jax.tree.map(lambda x, most=clip or norm, norm=norm: x * min(1.0, most / norm), g)
        m = jax.tree.map(lambda a, b: 0.9 * a + 0.1 * b, m, g)
        v = jax.tree.map(lambda a, b: 0.95 * a + 0.05 * b * b, v, g)
        c1, c2 = 1 - 0.9**step, 1 - 0.95**step
        p = jax.tree.map(
            lambda w, a, b, c1=c1, c2=c2: w - 0.01 * (a / c1 / (np.sqrt(b / c2) + 1e-12) + 0.1 * w), p, m, v
        )
        # A gradient near 0 has a direction of +-1 whose sign float32 may miss, so p follows the run from step to step.
        run_p, run_m, run_v = jax.device_get((run.weights, *run.moments))
        for ours, theirs, slope in zip(*(jax.tree.leaves(tree) for tree in (run_p, p, g))):
            far = np.abs(slope) > 1e-6
            assert np.abs(ours - theirs)[far].max() < 1e-5
        p, m, v = (jax.tree.map(np.float64, tree) for tree in (run_p, run_m, run_v))
    assert run.steps == 3 and run.sums is None


def test_the_square_of_the_gradient_counts_also_where_beta2_is_1_in_float32():
    one, adam = one_of(), ADAM | {"beta2": 1 - 1e-8}
    run = one.begin("run", None, 0)
    one.forward_backward("run", made(), "cross_entropy", {})
    before, slope = jax.device_get((run.weights, run.sums))
    one.step("run", adam)
    for second, new, old, g in zip(*map(jax.tree.leaves, (run.moments.second, run.weights, before, slope))):
        far = np.abs(g) > 1e-3
        assert np.allclose(np.asarray(second)[far], 1e-8 * np.float64(g[far]) ** 2, rtol=1e-5, atol=0)
        moved = old - 0.01 * (np.sign(g) + 0.1 * np.float64(old))
        assert np.abs(np.asarray(new) - moved)[far].max(initial=0) < 1e-5


def test_a_gradient_that_is_not_finite_moves_no_bit():
    one = one_of()
    run = one.begin("run", None, 0)
    before = jax.device_get((run.weights, run.moments))
    far = dataclasses.replace(made()[0], logprobs=np.full_like(made()[0].logprobs, -1e30))
    one.forward_backward("run", [far], "importance_sampling", {})
    with pytest.raises(Refusal, match="the gradient is not finite"):
        one.step("run", ADAM)
    after = jax.device_get((run.weights, run.moments))
    assert all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(before), jax.tree.leaves(after)))
    assert run.steps == 0 and run.sums is None


def test_saved_weights_continue_bit_for_bit(tmp_path):
    one, folder = one_of(), Snapshots(tmp_path)
    run = one.begin("run", lora_arms.PLAIN, 5)
    one.forward_backward("run", made(), "cross_entropy", {})
    one.step("run", ADAM)
    path = folder.path("", "run", "weights", "first")
    folder.write(path, one.snapshot("run", optimizer=True))
    assert folder.read(path, whole=False).steps == 1 and not folder.read(path, whole=False).trees

    def on(name):
        one.forward_backward(name, made(seed=2), "cross_entropy", {})
        one.step(name, ADAM)
        return jax.tree.leaves(jax.device_get((one.runs[name].weights, one.runs[name].moments)))

    whole = on("run")
    for optimizer in (True, False):
        other = one.begin("other", lora_arms.PLAIN, 6)
        one.load("other", folder.read(path), optimizer=optimizer)
        assert other.steps == (1 if optimizer else 0)
        assert all(np.array_equal(x, y) for x, y in zip(whole, on("other"))) is optimizer
    flat = load_file(tmp_path / "run" / "weights" / "first.safetensors")
    assert flat["weights/layers/0/q_a"].shape == run.weights["layers"]["0"]["q_a"].shape
    one.begin("all", None, 0)
    with pytest.raises(Refusal, match="the model trains all weights"):
        one.load("all", folder.read(path), optimizer=False)
    with pytest.raises(Refusal, match="was saved before"):
        folder.path("", "run", "weights", "first")
    with pytest.raises(Refusal, match="is damaged"):
        (tmp_path / "run" / "weights" / "first.safetensors").write_bytes(b"short")
        folder.read(path)


def test_additions_are_refused_on_another_base_of_the_same_name(tmp_path):
    one, folder = one_of(), Snapshots(tmp_path)
    other = trainer.Trainer(one._recipe, made_groups.weights(1), name="made", rows=2, tokens=24)
    paths = {}
    for name, given in (("added", lora_arms.PLAIN), ("whole", None)):
        one.begin(name, given, 0)
        paths[name] = folder.path("alice", name, "weights", "first")
        folder.write(paths[name], one.snapshot(name, optimizer=False))
        other.begin(name, given, 0)
        one.load(name, folder.read(paths[name]), optimizer=False)
        with pytest.raises(Refusal, match="there is no"):
            folder.read(paths[name]._replace(owner="bob"))
    with pytest.raises(Refusal, match="additions to other weights than 'made' here"):
        other.load("added", folder.read(paths["added"]), optimizer=False)
    with pytest.raises(Refusal, match="additions to other weights"):
        other.policy(folder.read(paths["added"]))
    whole = folder.read(paths["whole"])
    other.load("whole", whole, optimizer=False)
    with pytest.raises(Refusal, match="other shapes than 'made' here"):
        other.load("whole", dataclasses.replace(whole, mark="0"), optimizer=False)
    flat = load_file(tmp_path / "alice" / "added" / "weights" / "first.safetensors")
    save_file(flat, tmp_path / "alice" / "added" / "weights" / "first.safetensors", {"jaxrl_post": '{"base": "made"}'})
    with pytest.raises(Refusal, match="is damaged"):
        folder.read(paths["added"])


def test_a_file_that_cannot_be_written_is_refused_and_leaves_nothing(tmp_path, monkeypatch):
    folder, path = Snapshots(tmp_path), Saved("", "tinker://run/weights/x")
    one = Snapshot(base="made", mark="", lora=None, steps=0, trees={"weights": {"w": np.ones(3, np.float32)}})

    def full(leaves, file, told):
        file.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("jaxrl_post.serve.tinker.snapshots.save_file", full)
        with pytest.raises(Refusal, match=f"{path.path} cannot be written: .* No space left"):
            folder.write(path, one)
    assert [file for file in tmp_path.rglob("*") if file.is_file()] == []
    (tmp_path / "run" / "weights").rmdir()
    (tmp_path / "run" / "weights").write_text("no folder")
    with pytest.raises(Refusal, match="cannot be written"):
        folder.write(path, one)
    folder.remove(path)


@pytest.mark.parametrize(
    "path", ["tinker://../weights/x", "tinker://run/other/x", "/etc/passwd", "tinker://run/weights/.."]
)
def test_no_path_leads_out_of_the_folder(tmp_path, path):
    with pytest.raises(Refusal, match="must be tinker://RUN/weights/NAME"):
        Snapshots(tmp_path).read(Saved("", path))
