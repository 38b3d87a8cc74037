"""Low-rank additions to experts: against merged weights, on split devices, and in PEFT's files."""

from __future__ import annotations

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import lora_arms
import made_groups
import numpy as np
import numpy_llama
import pytest
from dense_attend import dense
from parity_arms import BY_EXPERT, GOLDENS
from refusals import refused

from jaxrl_post.models import decoder, experts, hf, layer, lora, peft, tensor_file
from jaxrl_post.models.model_config import Experts, Lora
from jaxrl_post.parallel import mesh as meshes

pytestmark = pytest.mark.usefixtures("quick_compilation")
GIVEN = lora_arms.ROOTED
SPARSE = dataclasses.replace(made_groups.MODEL, experts=Experts(8, 2, 24))
SHARED = dataclasses.replace(
    made_groups.MODEL, layers=3, windows=(), experts=Experts(6, 2, 12, False, shared_ffw=10, dense_layers=(1,))
)
CLIPPED = dataclasses.replace(made_groups.MODEL, experts=Experts(5, 2, 12, biased=True, limit=0.4))
MODELS = {"experts": SPARSE, "shared": SHARED, "clipped": CLIPPED}
EXACT = 1e-12


def weights(model, dtype=np.float64) -> dict:
    """No norm is 1 and no bias 0, so that forgetting one shows."""
    return made_groups.moved(made_groups.weights(0, dtype, model), 1, 0.2)


def scores(params, model) -> tuple[np.ndarray, np.ndarray]:
    """Of a text, and the text."""
    tokens = np.random.default_rng(1).integers(0, model.vocab_size, 14)

    @jax.jit
    def run(params):
        positions = jnp.arange(tokens.size)[None]
        h, _ = decoder.hidden(
            params, model, jnp.asarray(tokens)[None], positions, dense(positions), (), dtype=jnp.float64
        )
        return decoder.logits(params, model, h)[0]

    return np.asarray(run(params)), tokens


def gap(model, change=lambda added: added) -> float:
    """Largest distance of scores with additions from the numpy twin's scores of merged weights, in float64."""
    base, added = weights(model), lora_arms.adapter(GIVEN, 0, np.float64, model)
    with jax.enable_x64(True):
        found, tokens = scores(lora.joined(base, change(added)), lora.adapting(model, GIVEN))
    wanted = numpy_llama.forward(lora_arms.merged(base, added, GIVEN), model, tokens, dtype=np.float64)
    return float(np.abs(found - wanted).max() / np.abs(wanted).max())


@pytest.mark.parametrize("name", MODELS)
def test_scores_are_those_of_merged_weights(name):
    assert gap(MODELS[name]) <= EXACT


def test_a_planted_fault_moves_the_scores(monkeypatch):
    def swapped(added: dict, *names: str) -> dict:
        return {
            "layers": {
                at: {k: v[::-1] if k in names else v for k, v in own.items()} for at, own in added["layers"].items()
            }
        }

    for part in ("experts_gate_a", "experts_up_b", "experts_down_a"):
        assert gap(SPARSE, functools.partial(lambda part, added: swapped(added, part), part)) > 1e-3
    real = experts.mixed
    monkeypatch.setattr(experts, "mixed", lambda *given, lora_scale, **more: real(*given, lora_scale=1.0, **more))
    assert gap(SPARSE) > 1e-3


def test_gradients_on_split_matrices_are_those_of_merged_weights_by_the_chain_rule():
    assert lora_arms.gap(GIVEN, np.float64, SPARSE, sizes=(1, 1, 2)) <= EXACT


@pytest.mark.extended
@pytest.mark.parametrize(
    "more", [dict(scan_layers="yes", remat=True, remat_policy="projections"), dict(sizes=(2, 2, 2))]
)
def test_gradients_scanned_and_on_eight_devices(more):
    assert lora_arms.gap(GIVEN, np.float64, SHARED, **more) <= EXACT


@pytest.mark.extended
def test_gradients_without_the_scale_are_seen(monkeypatch):
    lora_arms.explicit(GIVEN, SPARSE)  # before the fault
    monkeypatch.setattr(Lora, "scale", 1.0)
    assert lora_arms.gap(GIVEN, model=SPARSE) > 1e-2


def test_low_products_of_a_split_matrix_add_up():
    """Of `down` each device has a part of the sum over F, and of A as many rows."""
    e, rows, rank = Experts(6, 2, 12), 9, 3
    draw = np.random.default_rng(0).standard_normal
    sizes = {"expert": e.count, "embed": 8, "ffw": e.ffw, None: rank}
    names = {name: axes for name, axes in layer.EXPERT_AXES.items() if name != "down_bias"}
    matrices = {name: draw([sizes[axis] for axis in axes]) for name, axes in names.items()}
    x, gates = draw((rows, 8)), draw((rows, 2))
    ids = np.random.default_rng(1).permuted(np.tile(np.arange(6), (rows, 1)), axis=1)[:, :2].astype(np.int32)
    run = functools.partial(experts.mixed, experts=e, activation="silu", lora_scale=0.7)
    with jax.enable_x64(True):
        alone = np.asarray(jax.jit(run)(x, ids, gates, matrices))
        split = meshes.by_experts(meshes.make_mesh(1, 1, 2), run, names)
        np.testing.assert_allclose(np.asarray(jax.jit(split)(x, ids, gates, matrices)), alone, rtol=0, atol=1e-12)
        bare = {name: matrix for name, matrix in matrices.items() if not name.startswith("down_")}
        assert np.abs(np.asarray(jax.jit(run)(x, ids, gates, bare)) - alone).max() > 1e-2


def test_axes_are_those_that_devices_split():
    axes = lora.axes(lora.adapting(SHARED, GIVEN))
    for name, own in layer.EXPERT_AXES.items():
        if not name.endswith("_bias"):
            leaves = (axes.adapter if name[-2:] in ("_a", "_b") else axes.base)["layers"]
            assert leaves["0"][f"experts_{name}"] == own and f"experts_{name}" not in leaves["1"]


# ---- merging


def policy(model, mesh=None) -> lora.Adapted:
    found = lora.Adapted(weights(model, np.float32), lora_arms.adapter(GIVEN, 0, model=model), GIVEN)
    axes = lora.axes(lora.adapting(model, GIVEN))
    homes = [meshes.param_shardings(mesh or meshes.make_mesh(), one, "engine") for one in (axes.base, axes.adapter)]
    return lora.Adapted(meshes.put(found.base, homes[0]), meshes.put(found.adapter, homes[1]), GIVEN)


def test_a_merge_is_that_of_numpy():
    base, added = weights(SHARED, np.float32), lora_arms.adapter(GIVEN, 0, np.float64, SHARED)
    wide = jax.tree.map(lambda x: x.astype(np.float64), base)
    wanted = lora_arms.merged(wide, added, GIVEN)
    found = jax.device_get(lora.merge(policy(SHARED)))
    assert max(made_groups.distances(found, wanted).values()) < 1e-6
    unmoved = {"router", "shared_router", "attn_norm", "ffw_norm"}
    for number, own in found["layers"].items():
        moved = {name for name, leaf in own.items() if not np.array_equal(leaf, base["layers"][number][name])}
        assert moved == set(own) - unmoved


def test_a_merged_export_has_the_bits_of_a_merge(tmp_path):
    """In one layout, of all experts of a matrix: on one device, and where F is split."""
    model = dataclasses.replace(SPARSE, qk_norm=True)
    for mesh in (meshes.make_mesh(), meshes.make_mesh(1, 1, 2)):
        hf.save(tmp_path / "out", model, lora.exported(policy(model, mesh)))
        merged = jax.device_get(lora.merge(policy(model, mesh)))
        assert all(map(np.array_equal, jax.tree.leaves(hf.load(tmp_path / "out")[1]), jax.tree.leaves(merged)))


def test_additions_begin_by_the_inputs_of_one_expert():
    own = lora.init(lora.adapting(SHARED, Lora(64, 16.0, ("gate", "down"))), 0)["layers"]["0"]
    inputs = dict(experts_gate=16, experts_down=12, shared_gate=16, shared_down=10)
    assert own.keys() == {f"{name}_{part}" for name in inputs for part in "ab"}
    for name, count in inputs.items():
        a = own[f"{name}_a"]
        assert np.abs(a).max() <= count**-0.5 < 1.05 * np.abs(a).max() and not own[f"{name}_b"].any()
    assert len({leaf.tobytes() for leaf in own["experts_gate_a"]}) == 6


# ---- PEFT's files


@pytest.mark.parametrize("family", BY_EXPERT)
def test_files_of_peft_come_back_by_expert(tmp_path, family):
    config = hf.read_config(GOLDENS / family / "config.json")
    model = lora.adapting(config, GIVEN)
    added = lora_arms.adapter(GIVEN, 0, model=config)
    peft.save(tmp_path / "out", model, added, base="base")
    assert peft.read(tmp_path / "out") == (GIVEN, "base")
    back = peft.load(tmp_path / "out", model)
    assert jax.tree.structure(back) == jax.tree.structure(added)
    assert all(map(np.array_equal, jax.tree.leaves(back), jax.tree.leaves(added)))

    at = next(layer for layer in range(config.layers) if config.experts_of(layer))
    block, gate, down = ("block_sparse_moe", "w1", "w2") if family == "mixtral" else ("mlp", "gate_proj", "down_proj")
    files = tensor_file.entries(tmp_path / "out" / peft.TENSORS)
    own, last = added["layers"][str(at)], config.experts.count - 1
    for theirs, ours in ((gate, "gate"), (down, "down")):
        for part in "ab":
            name = f"base_model.model.model.layers.{at}.{block}.experts.{last}.{theirs}.lora_{part.upper()}.weight"
            assert np.array_equal(tensor_file.read(files[name]), own[f"experts_{ours}_{part}"][last].T)
    # Every module that has tensors in the base and a name that is told has additions, and no other.
    told = json.loads((tmp_path / "out" / peft.CONFIG).read_text())["target_modules"]
    base = {name for file in (GOLDENS / family).glob("*.safetensors") for name in tensor_file.entries(file)}
    stems = {name.removesuffix(".weight") for name in base if name.endswith(".weight") and name.split(".")[-2] in told}
    assert {name.rpartition(".lora_")[0].removeprefix("base_model.model.") for name in files} == stems


def test_files_of_other_experts_are_refused(tmp_path):
    few, more = (dataclasses.replace(SPARSE, qk_norm=True, experts=Experts(count, 2, 24)) for count in (6, 8))
    peft.save(tmp_path / "few", lora.adapting(few, GIVEN), lora_arms.adapter(GIVEN, 0, model=few), base="base")
    name = r"layers.0.mlp.experts.6.down_proj.lora_A.weight is missing; expected shape \(4, 24\)"
    refused(name, peft.load, tmp_path / "few", lora.adapting(more, GIVEN))
    attention = GIVEN._replace(targets=("q", "o"))
    peft.save(
        tmp_path / "attention", lora.adapting(few, attention), lora_arms.adapter(attention, 0, model=few), base="base"
    )
    refused("it has targets=.*o_proj", peft.load, tmp_path / "attention", lora.adapting(few, GIVEN))
