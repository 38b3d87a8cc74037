"""The plan against numbers computed by hand, and against the arrays that a real mesh places."""

import dataclasses
import mmap
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from refusals import refused

from jaxrl_post.config import default, resolve
from jaxrl_post.engine import compiled
from jaxrl_post.engine.speculation.interface import Drafter
from jaxrl_post.launch.parts import build
from jaxrl_post.launch.plan import activations, chips, memory_plan, roofline
from jaxrl_post.launch.plan.memory_plan import Item, Kind
from jaxrl_post.models import decoder
from jaxrl_post.models.model_config import Experts, LinearAttention
from jaxrl_post.models.presets import PRESETS
from jaxrl_post.parallel import mesh as meshes
from jaxrl_post.trainer.learner import Learner, LearnerSettings
from jaxrl_post.trainer.teacher import Teacher

TINY = PRESETS["tiny"]
SIX_BY_FOUR = "scheduler.prompts=6 scheduler.group_size=4 batch.rows=2 batch.tokens=100"


def config(*overrides: str):
    """The config of a tiny model. Overrides are words as on a command line, one or several a string."""
    given = " ".join(("model.preset=tiny engine.max_length=64 sampling.max_tokens=30", *overrides))
    return resolve(default(), given.split())


def whole(model=TINY) -> int:
    """The number of weights."""
    return sum(leaf.size for leaf in jax.tree.leaves(decoder.abstract(model)))


def held_by(params) -> int:
    """Bytes of placed weights on one device."""
    return sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(params))


def summed(rows: dict[str, int]) -> int:
    return sum(value for name, value in rows.items() if name != "all")


def test_arithmetic_by_hand():
    given = config(SIX_BY_FOUR, "mesh.data=2 engine.slots=8 steps=50 eval.prompts=10 eval.samples=4")
    rows = memory_plan.arithmetic(given, prompts=120, longest_prompt=10)
    assert rows["rollouts per round"] == 24 and rows["engine slots in all"] == 16
    assert rows["times the slots are filled per round"] == 1.5
    assert rows["micro-batch, tokens"] == 200
    assert rows["most micro-batches per step"] == 6  # 40 tokens each: 2 in a row of 100, 4 in a micro-batch
    assert rows["epochs"] == 2.5 and rows["rollouts per evaluation"] == 50


def test_arithmetic_of_rounds_of_several_steps():
    given = config(SIX_BY_FOUR, "scheduler.mini_batches=3 scheduler.ppo_epochs=2 steps=60")
    rows = memory_plan.arithmetic(given, prompts=12, longest_prompt=10)
    assert rows["optimizer steps per round"] == 6 and rows["epochs"] == 5.0  # 10 rounds of 6 of 12 prompts
    assert rows["most micro-batches per step"] == 2  # 8 rollouts, 4 in a micro-batch


def test_arithmetic_of_shared_prompts():
    """A prompt of 10 tokens and answers of up to 30: a group takes 9 + 4 x 31 tokens."""

    def rows(tokens):
        given = config(SIX_BY_FOUR, "batch.shared_prompts=true", f"batch.tokens={tokens}")
        return memory_plan.arithmetic(given, prompts=120, longest_prompt=10)

    many, few = rows(270), rows(100)
    assert many["longest rollouts of a row that share prompts"] == 8 and many["most micro-batches per step"] == 2
    assert few["longest rollouts of a row that share prompts"] == 2  # 9 + 2 x 31, or two rollouts of 40
    for tokens, together in ((200, 4), (100, 2)):  # 8 + 4 x 31 tokens fit, or 8 + 2 x 31
        given = config(SIX_BY_FOUR, "batch.shared_prompts=true", f"batch.tokens={tokens}")
        assert roofline.packed_tokens(given, 9, 30) == 31 + 8 / together
    assert roofline.packed_tokens(config(), 9, 30) == 39


def test_predicted_seconds_count_a_shared_prompt_once():
    """Of 4,001 tokens and answers of one token a group of four needs about a quarter of what flat rows do."""
    where, model = chips.read("v5e-8"), PRESETS["qwen2_5_0_5b"]
    sizes = "scheduler.group_size=4", "batch.tokens=8192"
    flat, shared = (
        roofline.trained_token(config(*sizes, f"batch.shared_prompts={own}"), model, where, 4001, 1)
        for own in ("false", "true")
    )
    assert 3.9 < flat / shared < 4


def table(*overrides: str, model=TINY) -> dict[str, int]:
    return memory_plan.table(memory_plan.memory(config(*overrides), model))


def test_records_by_hand_and_those_that_a_host_does_not_hold():
    """24 rollouts of a round, of up to 30 tokens, each with three words."""
    given = config(SIX_BY_FOUR, "mesh.data=2 engine.slots=8")
    rows = memory_plan.arithmetic(given, 120, 10, words=3)
    size = rows["records of rollouts at hand, host bytes at most"]
    assert size == 24 * 30 * 3 * 4
    more = config(SIX_BY_FOUR, "mesh.data=2 engine.slots=20")  # forty rollouts run
    assert (
        memory_plan.arithmetic(more, 120, 10, words=3)["records of rollouts at hand, host bytes at most"]
        == 40 * 30 * 3 * 4
    )
    memory_plan.check_records(given, 3, size)
    refused(
        "^sampling.keep_routes=True: records of 24 rollouts of 30 tokens .* this host has .*; the nearest valid number of rollouts, "
        "in engine.slots and scheduler.prompts, is 23, and sampling.keep_routes=False records none$",
        *(memory_plan.check_records, given, 3, size - 1),
    )
    repeats = config(SIX_BY_FOUR, "algorithm.router_replay=true")
    refused("keep_routes=False with algorithm.router_replay=False records", memory_plan.check_records, repeats, 3, 1)
    cuts = config(SIX_BY_FOUR, "sampling.top_k=5")
    refused("^sampling.keep_mask=True: .* is 0, and sampling.keep_mask=False", memory_plan.check_records, cuts, 0, 1)
    memory_plan.check_records(config(SIX_BY_FOUR), 0, 0)
    assert 2**28 < memory_plan.of_host() < 2**50


@pytest.mark.parametrize("data, fsdp, tensor", [(1, 1, 1), (2, 2, 2)])
def test_weights_are_what_a_device_really_holds(data, fsdp, tensor):
    mesh = meshes.make_mesh(data, fsdp, tensor)
    params = meshes.put(decoder.init(TINY, 0), meshes.param_shardings(mesh, decoder.axes(TINY), "learner"))
    held = held_by(params)
    got = table(f"mesh.data={data} mesh.fsdp={fsdp} mesh.tensor={tensor} engine.dtype=bfloat16")
    assert got["weights (learner, float32)"] == got["gradient (float32)"] == held
    assert got["optimizer (two moments, float32)"] == 2 * held
    engine = meshes.put(decoder.init(TINY, 0), meshes.param_shardings(mesh, decoder.axes(TINY), "engine"))
    case = "relayout" if fsdp > 1 else "cast"
    assert got[f"weights (engine, bfloat16, {case})"] == held_by(engine) // 2
    assert got["all"] == summed(got)


def test_pages_by_hand():
    got = table("engine.pages=10", "engine.page_size=16")
    # 2 layers, keys and values, 160 positions, 2 heads of 8, 4 bytes
    assert got["KV pages (10 of 16 tokens, float32)"] == 2 * 2 * 160 * 2 * 8 * 4
    assert got["weights (engine, float32, shared)"] == 0 and got["weights (reference, float32)"] == 0
    assert table("algorithm.kl_loss_coef=0.1")["weights (reference, float32)"] > 0


@pytest.mark.parametrize(
    "changes", [[], ["speculation.drafter=ours", "engine.row_sizes=[128]"]], ids=["plain", "drafts"]
)
def test_a_cache_is_what_an_engine_makes(changes):
    """Where nothing is proposed, layers with a state keep no rows that may be rejected."""
    given = config("engine.slots=8", *changes)
    model = dataclasses.replace(TINY, linear=LinearAttention(2, 4, 8, 8, 4, layers=(0,)))
    sizes = build.engine_sizes(given, build.layouts(given)[0], model)
    state, _ = jax.eval_shape(lambda: compiled.Programs(model, meshes.make_mesh(), sizes).blanks(Drafter()))
    made = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state.cache))
    items = memory_plan.memory(given, model)
    assert sum(item.bytes for item in items if item.kind is Kind.PAGES) == made


def test_remat_and_a_smaller_head_chunk_need_less():
    plain, remat = (table(f"model.remat={r}")["activations (estimate)"] for r in (False, True))
    assert remat < plain
    large = dataclasses.replace(TINY, vocab_size=50000)  # of a small vocabulary the head never needs the most
    whole, chunked = (table(*given, model=large) for given in ((), ("batch.head_chunk=16",)))
    assert chunked["activations (estimate)"] < whole["activations (estimate)"]


def test_the_estimate_where_devices_share_rows():
    """As below, each row on two devices: half of the values, and keys and values of whole rows with their gradients."""
    given = ("model.remat=true", "batch.rows=1", "batch.tokens=1024", "model.scan_layers=yes")
    values = 512 * (2 * 32 + (2 * 4 + 2 * 2) * 8 + 3 * 64)
    pairs = 64 * 1024 * 8  # eight blocks of the device's own queries, each with all keys of the row
    gathered = 2 * 1024 * 2 * 2 * 8
    matrices = 32 * ((2 * 4 + 2 * 2) * 8 + 3 * 64)  # of the layer at work
    head, kept = 64 * 32, 2 * 512 * 32
    one, two = config(*given), config(*given, "mesh.fsdp=2", "mesh.context=2")
    assert activations.kept(one, TINY, 1)["full"] == 2 * activations.kept(two, TINY, 1)["full"] == 2 * 4 * kept
    found = activations.estimate(two, TINY, two.mesh.shards, "cpu")
    assert found == 4 * (kept + values + gathered + matrices + head) + 4 * pairs * 8


def test_the_estimate_by_hand():
    """2 rows of 512 tokens on one device: float32, two layers that are scanned, a stream of 32, 4 heads of 8, a gate of 64."""
    given = ("model.remat=true", "batch.rows=2", "batch.tokens=512", "model.scan_layers=yes")
    values = 2 * 512 * (2 * 32 + (2 * 4 + 2 * 2) * 8 + 3 * 64)
    pairs = 64 * 64 * (1 + 2 + 3 + 4 + 5 + 6 + 7 + 8)  # eight blocks, each with the keys up to its end
    head = 64 * 32 * 4  # the gradient of the tied table
    kept = 2 * 2 * 512 * 32
    got = table(*given)["activations (estimate)"]
    assert got == 4 * (kept + values) + 2 * 4 * pairs * 8 + head
    layers = 2 * (32 * (2 * 4 + 2 * 2) * 8 + 3 * 32 * 64)
    assert table(*given, "model.scan_layers=no")["activations (estimate)"] == got + 4 * layers


def test_embeddings_of_each_layer_by_hand():
    """Two layers have 6 numbers a token: the row, its product and its slope. Beside them are three values of the layer at work."""
    given = ("model.remat=true", "batch.rows=2", "batch.tokens=512", "model.scan_layers=yes")
    model, tokens = dataclasses.replace(TINY, layer_embeds=6), 2 * 512
    plain, got = (table(*given, model=one)["activations (estimate)"] for one in (TINY, model))
    assert got == plain + 4 * tokens * (3 * 2 * 6 + 3 * 6)
    assert activations.kept(config(*given), model, 1)["projections"] == (
        activations.kept(config(*given), TINY, 1)["projections"] + 2 * tokens * 4 * (6 + 32)
    )
    large = dataclasses.replace(model, vocab_size=10**6, layer_embeds=128)  # the gradient of whose table is the most
    got = table(*given, "batch.head_chunk=16", model=large)["activations (estimate)"]
    assert got == 4 * (3 * tokens * 2 * 128 + 10**6 * (2 * 128 + 32))
    assert roofline.used(large) == roofline.parameters(large) - 10**6 * 2 * 128
    added = table("lora.rank=4", *given, model=model), table("lora.rank=4", *given)
    assert added[0]["activations (estimate)"] - added[1]["activations (estimate)"] == 4 * tokens * (2 * 6 + 3 * 6)


def test_experts_beside_a_feed_forward_by_hand():
    """A token has the inner values of both. So has the largest layer, with those of every expert."""
    model = dataclasses.replace(TINY, experts=Experts(8, 2, 24, beside=True))
    assert model.widest == 2 * 24 + TINY.ffw and model.width_of(8) == 8 * 24 + TINY.ffw
    given = config("model.remat=true")
    kept, plain = (activations.kept(given, one, 1)["projections"] for one in (model, TINY))
    assert kept == plain + 2 * given.batch.rows * given.batch.tokens * 4 * 2 * 2 * 24
    assert roofline.used(model) == roofline.parameters(model) - 2 * 6 * 3 * 32 * 24


def test_what_each_policy_keeps_by_hand():
    """8 rows of 64 tokens on one device: 2 layers, a stream of 32, 4 query heads and 2 others of 8, a gate of 64, 4 bytes."""
    assert (TINY.layers, TINY.embed, TINY.heads, TINY.kv_heads, TINY.head_dim) == (2, 32, 4, 2, 8)
    given = config("batch.tokens=64", "batch.rows=8", "model.remat=true")
    got = activations.kept(given, TINY, given.mesh.shards)
    value = 2 * 8 * 64 * 4  # of every layer and token
    assert got["full"] == got["offload"] == 32 * value
    assert got["attention"] == (32 + 32) * value
    assert got["projections"] == (32 + 32 + 32 + 2 * 16 + 2 * TINY.ffw + 32) * value
    assert got["all (no remat)"] > got["projections"]
    halves = activations.kept(config("batch.tokens=64", "mesh.tensor=2"), TINY, 1)
    assert halves["projections"] == (32 + 16 + 16 + 16 + TINY.ffw + 32) * value


def test_moments_sums_stack_and_offload_by_hand():
    """A plan of another platform says so: there, "auto" scans the layers and splits the head."""
    mixed = ("optimizer.moments_dtype=bfloat16", "optimizer.sums_dtype=bfloat16", "model.compute_dtype=bfloat16")
    got, plain = table(*mixed), table()
    weights = plain["weights (learner, float32)"]
    assert got["optimizer (two moments, bfloat16)"] == weights == plain["optimizer (two moments, float32)"] // 2
    assert got["gradient (bfloat16)"] == weights // 2
    stack = "layers stacked in the step, and their gradient (bfloat16)"
    layers = sum(leaf.size for leaf in jax.tree.leaves(decoder.abstract(TINY)["layers"]))
    there = memory_plan.table(memory_plan.memory(config(*mixed), TINY, platform="tpu"))
    assert got[stack] == 0 and there[stack] == table(*mixed, "model.scan_layers=yes")[stack] == 2 * 2 * layers
    away = config("model.remat=true", "model.remat_policy=offload", "mesh.fsdp=2")
    held = memory_plan.by_device(away, memory_plan.memory(away, TINY))
    assert memory_plan.table(held[memory_plan.HOST])["all"] == activations.kept(away, TINY, 2)["full"]
    assert not any("offloaded" in item.what for item in held["device"])
    found = memory_plan.process(away, memory_plan.memory(away, TINY), {"commit": 1}, 1000, on_host=False)
    assert found["activations of layers, offloaded"] == 2 * activations.kept(away, TINY, 2)["full"]


@pytest.mark.parametrize("tied", [True, False])
def test_a_critic_is_what_its_arrays_are(tied):
    """A decoder of its own has weights, moments and a gradient, and no head. A value head is of no size."""
    model = dataclasses.replace(TINY, tied=tied)
    given = config("algorithm.adv_estimator=gae")
    params = decoder.abstract(model)
    critic = build.learner(given, model, params, build.device_plan(given)).state.params["critic"]
    size = sum(4 * leaf.size for leaf in jax.tree.leaves(critic["trunk"]))
    got = table("algorithm.adv_estimator=gae", model=model)
    assert got["weights (critic, float32)"] == got["gradient of the critic (float32)"] == size
    assert got["optimizer of the critic (two moments, float32)"] == 2 * size
    plain = table(model=model)
    assert got["all"] == plain["all"] + 4 * size
    assert table("algorithm.adv_estimator=gae", "critic.trunk=policy", model=model) == plain


def test_a_split_head_needs_less():
    split, whole = (
        table("mesh.fsdp=4", "batch.rows=4", f"batch.split_head={s}")["activations (estimate)"] for s in ("yes", "no")
    )
    assert split != whole


def test_the_process_by_hand():
    held = (
        Item(Kind.WEIGHTS, "weights", 100),
        Item(Kind.MOMENTS, "moments", 200),
        Item(Kind.REFERENCE, "reference", 0),
        Item(Kind.ACTIVATIONS, "estimate", 7),
    )
    two, saving = config("mesh.fsdp=2 checkpoint.every=0"), config("mesh.fsdp=2 mesh.data=2")
    programs = {"commit": 50, "accumulate": 60}

    def process(config, programs, on_host):
        return memory_plan.process(config, held, programs, 1000, on_host)

    assert process(two, programs, True) == {
        "process itself (compiled, no weights yet)": 1000,
        "weights": 200,
        "moments": 400,
        "largest program beside it (accumulate)": 120,
        "process at its highest": 1720,
    }
    # on an accelerator the process only hands the weights over, whole
    assert process(two, programs, False) == {
        "process itself (compiled, no weights yet)": 1000,
        "weights in transfer (float32)": 200,
        "process at its highest": 1200,
        "each device at its highest": 360,
    }
    # a checkpoint needs a copy of weights and moments, when no program runs: of both devices, once over data
    assert process(saving, programs, True) == {
        "process itself (compiled, no weights yet)": 1000,
        "weights": 400,
        "moments": 800,
        "copy of weights and moments for a checkpoint": 600,
        "process at its highest": 2800,
    }
    assert process(saving, {"commit": 250, "accumulate": 60}, True)["process at its highest"] == 3200
    assert process(saving, {"commit": 50}, False)["process at its highest"] == 1600
    size = 64 << 20
    with mmap.mmap(-1, size) as block:  # asked of the system itself: the allocator may have freed blocks to reuse
        np.frombuffer(block, np.uint8)[:] = 1
        with_it = memory_plan.resident()
    assert with_it - memory_plan.resident() >= 0.9 * size or not memory_plan.Path("/proc/self/status").is_file()


LENDS = "scheduler.stream=1", "scheduler.lend=0.5", "batch.rows=4", "checkpoint.every=0"


def tables(config) -> dict[str, dict[str, int]]:
    held = memory_plan.by_device(config, memory_plan.memory(config, TINY))
    return {device: memory_plan.table(items) for device, items in held.items()}


def test_a_device_that_is_lent_by_hand():
    """Four devices that generate beside two that learn, of which two are lent: for each a half of the weights and of the gradient,
    which the learner's two have as well."""
    lends = config(*LENDS, "mesh.fsdp=2", "mesh.engine=4")
    kinds = tables(lends)
    lent, learns, generates = (
        kinds[f"device {kind}"] for kind in ("while it is lent", "that learns", "that generates")
    )
    weights = learns["weights (learner, float32)"]
    assert lent["weights (lent, float32)"] == lent["gradient (lent, float32)"] == weights > 0
    assert learns["gradient of lent devices, as it is added (float32)"] == learns["gradient (float32)"] == weights
    assert lent["all"] == 2 * weights + lent["activations (estimate)"]
    assert "KV pages" in " ".join(generates) and "KV pages" not in " ".join((*lent, *learns))
    # Generating takes 100 a device, and what a lent one has instead 2 * 70: the process is at its highest while two are lent.
    held = (
        Item(Kind.WEIGHTS, "weights", 10),
        Item(Kind.WEIGHTS, "lent weights", 70, lent=True),
        Item(Kind.GRADIENT, "lent gradient", 70, lent=True),
        Item(Kind.ACTIVATIONS, "estimate", 5, lent=True),
        Item(Kind.MOMENTS, "moments", 0),
        Item(Kind.ACTIVATIONS, "estimate", 7),
    )
    for pages, most in ((100, 1000 + 20 + 200 + 280 + 6), (200, 1000 + 20 + 800 + 6)):  # then while none is lent
        found = memory_plan.process(lends, (*held, Item(Kind.PAGES, "pages", pages)), {"commit": 1}, 1000, on_host=True)
        assert found["process at its highest"] == most


def test_a_shared_device_that_is_lent_keeps_what_learns():
    """Whole weights are the learner's own; of quarters, halves are made."""
    for sizes, more in ((4, 1, 1), 0), ((1, 4, 1), 1):
        lends, whole = config(*LENDS, f"mesh.data={sizes[0]}", f"mesh.fsdp={sizes[1]}"), meshes.make_mesh(*sizes)
        shardings = meshes.param_shardings(meshes.divided(whole, 2, whole)[1], decoder.axes(TINY), "learner")
        placed = meshes.put(decoder.init(TINY, 0), shardings)
        there = held_by(placed)
        kinds = tables(lends)
        lent, device = kinds["device while it is lent"], kinds["device"]
        assert lent["weights (lent, float32)"] == more * there and lent["gradient (lent, float32)"] == there
        assert lent["gradient (float32)"] == device["gradient (float32)"] == device["weights (learner, float32)"] > 0
        assert lent["optimizer (two moments, float32)"] == device["optimizer (two moments, float32)"] > 0
        assert any(name.startswith("KV pages") for name in device)
        assert not any(name.startswith("KV pages") for name in lent)
        held = memory_plan.memory(lends, TINY)
        assert device["all"] == sum(item.bytes for item in held if not item.lent)


def test_a_mesh_that_does_not_divide_is_one_sentence():
    with pytest.raises(ValueError, match="mesh.tensor=4 does not divide the model's kv_heads=2; the nearest .* 2"):
        memory_plan.memory(config("mesh.tensor=4"), TINY)


def test_an_engine_that_divides_layers_by_a_number_of_its_own():
    sizes = dict(shape=(2, 1, 2), given=("mesh.fsdp=4", "mesh.engine_tensor=2", "engine.dtype=bfloat16"))
    placed = meshes.put(
        decoder.init(TINY, 0), meshes.param_shardings(meshes.make_mesh(*sizes["shape"]), decoder.axes(TINY), "engine")
    )
    there, got = held_by(placed), table(*sizes["given"])
    assert config(*sizes["given"]).replicas == 2
    assert got["weights (engine, bfloat16, relayout)"] == there // 2
    pages = [size for name, size in got.items() if name.startswith("KV pages")]
    assert (
        2 * pages[0]
        == table("mesh.fsdp=4", "engine.dtype=bfloat16")[f"KV pages ({config().pages} of 16 tokens, bfloat16)"]
    )
    with pytest.raises(ValueError, match="mesh.engine_tensor=4 does not divide the model's kv_heads=2; .* value is 2"):
        memory_plan.memory(config("mesh.fsdp=4", "mesh.engine_tensor=4"), TINY)
    with pytest.raises(
        ValueError, match="engine_tensor=3 makes replicas of 3 devices, .* divide the 4 .*; the nearest .* is 2"
    ):
        config("mesh.fsdp=4", "mesh.engine_tensor=3")


def test_an_engine_that_sleeps_leaves_its_memory_to_the_learner():
    given = ("engine.dtype=bfloat16", "mesh.fsdp=2")
    whole, slept = (tables(config(*given, *more)) for more in ((), ("engine.sleep=true",)))
    learns, generates = slept["device while it learns"], slept["device while it generates"]
    own = [name for name in whole["device"] if name.startswith(("weights (engine", "KV pages", "drafting"))]
    work = [name for name in whole["device"] if name.startswith(("activations", "layers stacked"))]
    assert len(own) == 3 and len(work) == 2 and len(slept) == 2
    assert learns["all"] == whole["device"]["all"] - sum(whole["device"][name] for name in own)
    assert generates["all"] == whole["device"]["all"] - sum(whole["device"][name] for name in work)


@pytest.mark.extended
@pytest.mark.parametrize("beta", [0.5, 1.0])
def test_the_law_of_a_teacher_takes_what_a_compiled_program_needs_for_it(beta):
    """Programs with and without a teacher, of one policy whose logits are most of what its step needs."""
    model = dataclasses.replace(TINY, vocab_size=8192, max_length=256)
    sizes = "batch.rows=2 batch.tokens=256 batch.head_chunk=256 engine.max_length=128 sampling.max_tokens=64"
    taught = "eval.prompts=0 algorithm.adv_estimator=distill teacher.path=x"
    needed, estimated = {}, {}
    for mode, more in (("vanilla", ""), ("gkd", f"algorithm.gkd_beta={beta}")):
        given = config(sizes, taught, f"algorithm.loss_mode={mode}", more)
        shapes, mesh = decoder.abstract(model), meshes.make_mesh(1, 1, 1)
        teacher = Teacher(model, shapes, mesh)
        about = dict(algorithm=given.algorithm, optimizer=given.optimizer, batch=given.batch, remat=True)
        settings = LearnerSettings(**about, temperature=1.0, steps=2, max_tokens=64)
        made = Learner(model, shapes, mesh, settings, teacher=teacher)
        needed[mode] = made.temporaries()["accumulate"]
        estimated[mode] = activations.estimate(given, model, 1, "cpu")
    more = {name: found["gkd"] - found["vanilla"] for name, found in (("needed", needed), ("told", estimated))}
    assert more["told"] == pytest.approx(more["needed"], rel=0.1)


def test_text_lines_up():
    rows = {"a": 2**20, "none": 0, "small": 52428, "longer": np.int64(3 * 2**30)}
    lines = memory_plan.text("Memory", rows, "B").splitlines()
    assert lines == ["Memory", "  a              1.0 MiB", "  longer     3,072.0 MiB"]


def test_the_drafters_tables_are_in_the_plan():
    """By hand. There are 64 entries for all prompts and 1,024 for those in slots, each rounded up to whole uploads. Each of
    4 slots has 256 live entries. An entry has 4 bytes. Each class adds a rate and two counts."""
    asked = config(
        "speculation.drafter=ours speculation.prompt_entries=1024 speculation.shared_entries=64",
        "speculation.live_entries=256 engine.slots=4 engine.row_sizes=(64,)",
    )
    start = SimpleNamespace(model=TINY, held_out=(), reward_model=None, judge=None)
    classes = build.drafter(asked, TINY).classes
    got = memory_plan.table(build.memory(asked, start))
    assert got["drafting (tables of one replica)"] == 4 * (2 * 1024 + 4 * 256 + 3 * classes)
    assert got["all"] == summed(got)
    assert memory_plan.table(build.memory(config(), start))["drafting (tables of one replica)"] == 0


@pytest.mark.parametrize("fsdp", [1, 2])
def test_additions_are_counted_by_hand(fsdp):
    """Moments, gradient and reference are those of A and B; the base is there once, and in the engine's layout where it differs."""
    given = config(
        f"mesh.fsdp={fsdp} lora.rank=4 lora.targets=('q_proj','down_proj') lora.base_dtype=bfloat16",
        "engine.dtype=bfloat16 algorithm.kl_loss_coef=0.1",
    )
    m = TINY
    q, down = m.embed * m.heads * m.head_dim, m.ffw * m.embed
    # A of q and B of down have an axis of the model's width, which fsdp divides. The others lie whole on each device.
    added = m.layers * 4 * ((m.embed + m.embed) // fsdp + m.heads * m.head_dim + m.ffw)
    held = {item.what: item.bytes for item in memory_plan.memory(given, m)}
    assert held["additions (learner, float32)"] == held["gradient (float32)"] == 4 * added
    assert held["optimizer (two moments, float32)"] == 8 * added
    assert held["weights (reference, float32)"] == 4 * added
    case = "merge" if fsdp == 1 else "relayout and merge"
    merged = m.layers * (q + down)
    assert held[f"weights (engine, bfloat16, {case})"] == 2 * (merged if fsdp == 1 else whole())
    assert held["matrices to be merged (engine, bfloat16)"] == (0 if fsdp == 1 else 2 * merged)
    assert memory_plan.swap_case(given) == case


@pytest.mark.parametrize("fsdp", [1, 2])
def test_codes_of_additions_are_counted_by_hand(fsdp):
    """A byte for each number of a matrix and four for each output's scale. The engine has no copy of the base to merge."""
    given = config(
        f"mesh.fsdp={fsdp} lora.rank=4 lora.targets=('q_proj',) lora.base_dtype=bfloat16 engine.dtype=bfloat16",
        "engine.weights=int8 algorithm.rollout_is=token",
    )
    m = TINY
    read, kept = m.heads * m.head_dim, 2 * m.kv_heads * m.head_dim
    matrices = m.layers * m.embed * (2 * read + kept + 3 * m.ffw)
    outputs = m.layers * (read + kept + m.embed + 2 * m.ffw + m.embed)
    case = "merge and code" if fsdp == 1 else "merge, code and relayout"
    held = {item.what: item.bytes for item in memory_plan.memory(given, m)}
    others = 0 if fsdp == 1 else 2 * (whole() - matrices)  # of the learner, where the layouts agree
    assert held[f"weights (engine, matrices in int8, else bfloat16, {case})"] == matrices + 4 * outputs + others
    assert not any("to be merged" in what for what in held) and memory_plan.swap_case(given) == case


def test_a_reward_model_lies_with_the_engine_and_stays_while_it_sleeps():
    judge, words = dataclasses.replace(TINY, scalar=True), "weights (reward model, bfloat16)"
    size = 2 * whole(judge)
    for more, where in (
        ((), {memory_plan.SHARED}),
        (("mesh.engine=1",), {memory_plan.GENERATES}),
        (("engine.sleep=true",), {memory_plan.LEARNING, memory_plan.GENERATING}),
    ):
        asked = config("engine.dtype=bfloat16", *more)
        held = memory_plan.by_device(asked, (*memory_plan.memory(asked, TINY), *memory_plan.reward_model(asked, judge)))
        found = {device: memory_plan.table(own).get(words) for device, own in held.items()}
        assert {device for device, n in found.items() if n == size} == where, found
        assert {n for device, n in found.items() if device not in where} <= {None}


def test_a_judge_lies_with_the_engine_or_waits_on_the_host():
    """Weights and pages by hand: TINY twice as long, in bfloat16, in slots of the policy's engine."""
    size = 2 * whole()
    asked = ("engine.dtype=bfloat16", "judge.model=m", "judge.question={answer}")
    own = config("engine.dtype=bfloat16", "engine.max_length=128", "engine.slots=8", "batch.tokens=128")
    pages = 2 * TINY.layers * 8 * 128 * TINY.kv_heads * TINY.head_dim * 2
    every, here = {memory_plan.SHARED}, "weights (judge, bfloat16)"
    for more, where in (
        ((), every),
        (("mesh.engine=1",), {memory_plan.GENERATES}),
        (("engine.sleep=true",), {memory_plan.LEARNING, memory_plan.GENERATING}),
        (("judge.asleep=true",), {memory_plan.JUDGING}),
        (("judge.asleep=true", "engine.sleep=true"), {memory_plan.GENERATING}),
        (("judge.asleep=true", "mesh.engine=1"), {memory_plan.GENERATES}),
    ):
        given = config(*asked, *more)
        items = (*memory_plan.memory(given, TINY), *memory_plan.judge(given, own, TINY))
        held = memory_plan.by_device(given, items)
        assert {device for device, mine in held.items() if memory_plan.table(mine).get(here) == size} == where
        told = memory_plan.table(held[next(iter(where))])
        assert [n for name, n in told.items() if name.startswith("KV pages (judge")] == [pages]
        waits = memory_plan.table(held.get(memory_plan.JUDGE_HOST, ())).get("weights (judge, asleep)")
        assert waits == (size if given.judge.asleep else None)


@pytest.mark.parametrize("replicas", [1, 2])
def test_replicas_share_the_copy_of_a_judge_that_sleeps(replicas):
    """As HostWeights of engine/row_engine.py keeps it: each piece once, however many devices of a process have it."""
    given = config("judge.model=m", "judge.question={answer}", "judge.asleep=true", f"mesh.data={replicas}")
    found = memory_plan.process(given, memory_plan.judge(given, given, TINY), {"commit": 1}, 1000, True)
    assert found["weights (judge, asleep)"] == 4 * whole()


def test_while_a_judge_is_awake_nothing_is_computed_for_a_learner_of_rounds():
    asked = ("judge.model=m", "judge.question={answer}", "judge.asleep=true")
    for more, counted in (((), False), (("scheduler.stream=1",), True)):
        given = config(*asked, *more)
        items = (*memory_plan.memory(given, TINY), *memory_plan.judge(given, config(), TINY))
        held = memory_plan.by_device(given, items)
        assert ("activations (estimate)" in memory_plan.table(held[memory_plan.JUDGING])) is counted
        assert "activations (estimate)" in memory_plan.table(held[memory_plan.SHARED])
        assert "weights (learner, float32)" in memory_plan.table(held[memory_plan.JUDGING])
