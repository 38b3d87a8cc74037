"""The Tinker API over real sockets: its forms, equal bits alone and beside others, seeds, saved weights and refusals."""

from __future__ import annotations

import asyncio
import concurrent.futures
import hashlib
import sys
import threading
import time

import numpy as np
import pytest
from tinker_client import ROOT, datum, served, text

import jaxrl_post
from jaxrl_post.ring.types import Finish, Prompt, Request, RolloutId
from jaxrl_post.serve.tinker import bodies
from jaxrl_post.serve.tinker.sampler import BASE
from jaxrl_post.serve.tinker.snapshots import Saved

sys.path.insert(0, str(ROOT / "scripts"))

import hostile_clients

pytestmark = pytest.mark.usefixtures("quick_compilation")

ADAM = {"learning_rate": 0.02, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12}
SUM = [3, 8, 11, 9, 12]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with served(tmp_path_factory.mktemp("saved")) as one:
        yield one


@pytest.fixture
def client(server):
    return server.begun()


def written(seed: int, count: int = 5) -> list[dict]:
    """Datums of demonstrations."""
    rng = np.random.default_rng(seed)
    texts = [rng.integers(1, 13, rng.integers(3, 20)) for _ in range(count)]
    return [datum(ids[:-1], ids[1:], weights=np.ones(len(ids) - 1)) for ids in texts]


def learned(client, rank: int, seed: int, steps: int = 2) -> list:
    """What a client gets from a small loop of both kinds: losses, log-probs, and rollouts of every step's weights."""
    model, out = client.model(rank, seed=seed), []
    for step in range(steps):
        out.append(client.passed(model, written(seed + step), "cross_entropy"))
        out.append(client.train("optim_step", model, adam_params=ADAM))
        saved = client.train("save_weights_for_sampler", model, sampling_session_seq_id=step)
        asked = [
            client.sample(saved["sampling_session_id"], SUM, 2, max_tokens=9, seed=s, logprobs=True) for s in range(3)
        ]
        rollouts = [client.result(one) for one in asked]
        out.append(rollouts)
        data = []
        for one in (sequence for found in rollouts for sequence in found["sequences"]):
            ids, unseen = SUM + one["tokens"], [0.0] * (len(SUM) - 1)
            floats = {"logprobs": unseen + one["logprobs"], "advantages": unseen + [0.3] * len(one["tokens"])}
            data.append(datum(ids[:-1], ids[1:], **floats))
        out.append(client.passed(model, data, "ppo"))
        out.append(client.train("optim_step", model, adam_params=ADAM))
    return out


def test_a_loop_has_equal_bits_alone_and_beside_others(server):
    cases = [(4, 1), (0, 2)]
    alone = [learned(server.begun(), *case) for case in cases]
    with concurrent.futures.ThreadPoolExecutor(len(cases)) as pool:
        together = list(pool.map(lambda case: learned(server.begun(), *case), cases))

    def bits(one):
        return [{**part, "sampling_session_id": ""} if isinstance(part, dict) else part for part in one]

    assert [bits(one) for one in together] == [bits(one) for one in alone]
    losses = [part["metrics"]["loss:sum"] for part in alone[0] if isinstance(part, dict) and "loss_fn_outputs" in part]
    assert len(set(losses)) == len(losses)


def request(own, named: str, sample: int) -> Request:
    return Request(
        rollout_id=RolloutId(0, "eval", 0, named, sample),
        prompt=Prompt(id=named, tokens=SUM),
        seed=RolloutId(7, "eval", 0, named, sample).seed(),
        max_tokens=8,
        sampling=own.sampling_with({"temperature": 0.8}),
    )


def test_rollouts_are_those_of_the_engine_and_prompts_are_scored(client):
    """The base by the engine alone, with keys made by hand; the prompt by its own log-probs."""
    found = client.result(client.sample(client.sampler(), SUM, 3, max_tokens=8, seed=7, temperature=0.8, logprobs=True))
    own = jaxrl_post.load(
        "configs/demo_policy", engine__slots=8, engine__row_sizes=(32,), engine__max_length=64, sampling__max_tokens=24
    )
    named = hashlib.blake2b(np.array(SUM, np.int32).tobytes(), digest_size=16).hexdigest()
    engine = own.engine()
    engine.submit([request(own, named, sample) for sample in range(3)])
    expected = sorted((one for _ in range(9) for one in engine.step()), key=lambda one: one.id.sample)
    assert len(expected) == 3 == len(found["sequences"])
    for one, ours in zip(found["sequences"], expected):
        assert one["tokens"] == ours.tokens.tolist()
        assert np.array_equal(np.float32(one["logprobs"]), ours.logprobs)
        assert one["stop_reason"] == ("length" if ours.finish is Finish.LENGTH else "stop")
    assert found["sampling_law"] == {"temperature": 0.8, "top_k": 0, "top_p": 1.0}
    scored = own.logprobs([SUM[:1]], [SUM[1:]], sampling={"temperature": 1.0})[0]
    assert found["prompt_logprobs"][0] is None
    assert np.allclose(found["prompt_logprobs"][1:], scored, rtol=0, atol=1e-5)


def test_seeds(client):
    sampler = client.sampler()

    def tokens(n=1, **params):
        given = dict(max_tokens=12, temperature=5.0) | params
        return [one["tokens"] for one in client.result(client.sample(sampler, SUM, n, **given))["sequences"]]

    assert tokens(seed=5) == tokens(seed=5) != tokens(seed=6)
    four = tokens(4, seed=5)
    assert four[0] == tokens(seed=5)[0] and len({tuple(one) for one in four}) == 4
    assert tokens(8) != tokens(8)
    assert tokens(temperature=0.0, seed=1) == tokens(temperature=0.0, seed=2)
    assert tokens(seed=5, top_k=1) == tokens(temperature=0.0)
    first = tokens(seed=5)[0]
    cut = tokens(seed=5, stop=[first[2]])[0]
    assert cut == first[: first.index(first[2]) + 1]


def test_a_request_that_is_sent_again_is_carried_out_once(client):
    model = client.model()
    body = {"model_id": model, "seq_id": 1, "forward_backward_input": {"data": written(0), "loss_fn": "cross_entropy"}}
    first, again = client.post("forward_backward", **body), client.post("forward_backward", **body)
    assert first["request_id"] == again["request_id"]
    norm = client.result(client.post("optim_step", model_id=model, seq_id=2, adam_params=ADAM))["metrics"]["grad_norm"]
    other = client.model()
    client.passed(other, written(0), "cross_entropy")
    assert client.train("optim_step", other, adam_params=ADAM)["metrics"]["grad_norm"] == norm > 0


def test_weights_are_ones_where_they_are_left_out(client):
    ids = np.arange(1, 9)
    model, bare = client.model(), datum(ids[:-1], ids[1:])
    found = client.passed(model, [bare], "cross_entropy", backward=False)
    (out,) = found["loss_fn_outputs"]
    assert out["logprobs"]["dtype"] == "float32" and out["logprobs"]["shape"] == [7]
    assert found["metrics"]["loss:sum"] == pytest.approx(-sum(out["logprobs"]["data"]), rel=1e-6)


def test_saved_state_is_loaded_by_another_session(client, server):
    model = client.model()
    client.passed(model, written(0), "cross_entropy")
    client.train("optim_step", model, adam_params=ADAM)
    path = client.train("save_weights", model, path="state")["path"]
    assert path == f"tinker://{model}/weights/state"
    other = server.begun()
    about = other.post("weights_info", tinker_path=path)
    assert (about["base_model"], about["is_lora"], about["lora_rank"]) == ("demo", True, 4)
    whole = client.model(rank=0)
    about = other.post("weights_info", tinker_path=client.train("save_weights", whole, path="all")["path"])
    assert about["lora_rank"] == 0 and about["train_mlp"] and about["train_attn"] and about["train_unembed"]
    copy = other.model(seed=9)
    assert other.train("load_weights", copy, path=path, optimizer=True)["path"] == path
    passes = [one.passed(name, written(1), "cross_entropy") for one, name in ((client, model), (other, copy))]
    assert passes[0] == passes[1]
    assert client.train("save_weights", model, path="state")["error"].startswith(path)
    wrong = other.train("load_weights", other.model(8), path=path)
    assert "rank 4" in wrong["error"] and wrong["category"] == "user"


def test_an_unloaded_run_is_gone_and_what_it_saved_is_sampled(client):
    model = client.model()
    path = client.train("save_weights_for_sampler", model, path="kept")["path"]
    about = client.post("get_info", model_id=model)["model_data"]
    assert about["tokenizer_id"] == str(ROOT / "configs" / "demo_policy")  # whole: clients run in other folders
    client.result(client.post("unload_model", model_id=model))
    assert client.ask("POST", "get_info", {"model_id": model})[0] == 404
    sampler = client.sampler(path)
    assert client.ask("GET", f"samplers/{sampler}")[1]["model_path"] == path
    assert client.result(client.sample(sampler, SUM, max_tokens=3, seed=0))["sequences"]


def test_a_replaced_name_is_sampled_as_it_is_now(client):
    """Two names for the same weights: one was on the engine before it was replaced, the other is new."""
    model = client.model()

    def rollouts(sampler):
        return client.result(client.sample(sampler, SUM, 2, max_tokens=8, seed=3, logprobs=True))

    sampler = client.sampler(client.train("save_weights", model, path="now")["path"])
    before = rollouts(sampler)
    client.passed(model, written(0), "cross_entropy")
    client.train("optim_step", model, adam_params=ADAM)
    client.train("save_weights", model, path="now", overwrite=True)
    same = client.sampler(client.train("save_weights", model, path="same")["path"])
    after = rollouts(sampler)
    assert after == rollouts(same) != before


def test_weights_whose_file_was_removed_are_refused_and_the_server_goes_on(client, server):
    path = client.train("save_weights_for_sampler", client.model(), path="gone")["path"]
    sampler = client.sampler(path)
    asked = dict(max_tokens=4, seed=0)
    assert client.result(client.sample(sampler, SUM, **asked))["sequences"]
    server.server.service._snapshots.remove(Saved("", path))
    for logprobs in (False, True):
        assert "there is no" in client.result(client.sample(sampler, SUM, logprobs=logprobs, **asked))["error"]
    assert client.result(client.sample(client.sampler(), SUM, **asked))["sequences"]


def test_a_run_is_freed_where_its_session_ends_before_it_is_unloaded(server):
    """The devices are busy meanwhile, so that the request to unload waits. A sampler that comes late is not kept."""
    client, service, go = server.begun(), server.server.service, threading.Event()
    model, session = client.model(), service._sessions[client.session]
    assert model in service._trainer.runs
    service.thread.call(lambda: go.wait(60), owner="other")

    async def end():
        service.unload_model("", bodies.BODIES["unload_model"](model_id=model))
        service._leave(session)
        service._keep("late", session, BASE)

    asyncio.run_coroutine_threadsafe(end(), service._loop).result(60)
    go.set()
    server.begun().model()  # behind the end of the session
    assert model not in service._trainer.runs and "late" not in service._samplers


def test_what_a_request_leaves_out_of_the_law_is_as_the_sdk_has_it():
    body = {"prompt": text(SUM), "sampling_params": {"max_tokens": 4}, "sampling_session_id": "x"}
    law = bodies.read("asample", body, bodies.Limits(vocab=15, positions=64, stops=7))[1].sampling_changes
    assert law == {"temperature": 1.0, "top_p": 1.0, "top_k": 0}


def test_a_client_that_knows_all_of_another_reaches_nothing(tmp_path):
    """Two owners; then the server is started again, and only files are left."""
    keys = {"tml-alice": "alice", "tml-bob": "bob"}
    with served(tmp_path, keys=keys, key="tml-alice") as alice:
        bob = alice.begun("tml-bob")
        model, own = alice.model(), bob.model()
        paths = [alice.train("save_weights", model, path="state")["path"]]
        paths.append(alice.train("save_weights_for_sampler", model, path="kept")["path"])
        asked = alice.sample(alice.sampler(paths[1]), SUM, 2, max_tokens=8, seed=3)
        before = alice.passed(model, written(0), "cross_entropy", backward=False)
        known = dict(session=alice.session, run=model, own_run=own, own_session=bob.session, model="demo", paths=paths)
        known |= {"sampler": alice.sampler(), "requests": [asked["request_id"]]}
        tries = hostile_clients.knowing(known)
        assert len(tries) > 80 and not [one for one in tries if hostile_clients.reached(bob.ask, *one)]
        assert alice.passed(model, written(0), "cross_entropy", backward=False) == before
        rollouts = alice.result(asked)
        assert rollouts["sequences"] and not [one for one in tmp_path.rglob("*") if "stolen" in one.name]
    with served(tmp_path, keys=keys, key="tml-bob") as bob:
        known |= {"own_run": bob.model(), "own_session": bob.session}
        assert not [one for one in hostile_clients.knowing(known) if hostile_clients.reached(bob.ask, *one)]
        alice = bob.begun("tml-alice")
        assert alice.result(alice.sample(alice.sampler(paths[1]), SUM, 2, max_tokens=8, seed=3)) == rollouts


def test_no_value_of_a_client_ends_the_thread(client):
    """Every fifth of the hostile values; the others are in the show tinker."""
    sampler, service, told = client.sampler(), client.server.service, []
    thread = service.thread._thread
    for number, changes in enumerate(hostile_clients.tinker_values()[::5]):
        body = {"sampling_session_id": sampler, "seq_id": 1000 + number, "prompt": text(SUM)} | changes
        status, found = client.ask("POST", "asample", body)
        told.append(status)
        assert status == 400 or (status == 200 and "error" not in client.result(found)), changes
    assert service.thread._thread is thread and told.count(400) > len(told) / 2
    status, found = client.ask(
        "POST",
        "asample",
        {"sampling_session_id": sampler, "prompt": text(SUM), "sampling_params": {"stop": [1] * 1000}},
    )
    assert status == 400 and found["detail"] == "stop has 1000 ids; at most 7 are served"


@pytest.mark.parametrize("stop", ["<eos>\n", ["+", "1<eos>"], "\ufffd", [""], ["+", ""]])
def test_a_stop_string_that_no_text_can_hold_is_refused_at_the_door(client, stop):
    body = {
        "sampling_session_id": client.sampler(),
        "seq_id": 0,
        "prompt": text(SUM),
        "sampling_params": {"stop": stop},
    }
    status, told = client.ask("POST", "asample", body)
    assert status == 400 and "stop" in told["detail"]
    assert client.result(client.sample(body["sampling_session_id"], SUM, max_tokens=2, seed=0))["sequences"]


def test_a_stop_string_that_is_a_special_token_is_its_id(client):
    """The demo's end token, 0, and no stop at all."""
    sampler = client.sampler()
    plain, named = (client.sample(sampler, SUM, 4, max_tokens=9, seed=5, **more) for more in ({}, {"stop": "<eos>"}))
    assert client.result(plain) == client.result(named)


def test_a_thread_that_fails_tells_all_ends_the_session_at_fault_and_begins_anew(server, monkeypatch):
    seen = []
    monkeypatch.setattr(threading, "excepthook", lambda told: seen.append(told.exc_type))
    fault, other = server.begun(), server.begun()
    models, service = (fault.model(), other.model()), server.server.service
    before = other.passed(models[1], written(0), "cross_entropy", backward=False)
    monkeypatch.setattr(service._trainer, "step", lambda *_: {}["planted"])
    failed = fault.train("optim_step", models[0], adam_params=ADAM)
    monkeypatch.undo()
    assert failed["category"] == "server" and "begins anew" in failed["error"]
    assert other.passed(models[1], written(0), "cross_entropy", backward=False) == before
    assert fault.ask("POST", "get_info", {"model_id": models[0]})[0] == 404 and models[0] not in service._trainer.runs
    sampled = other.result(other.sample(other.sampler(), SUM, max_tokens=2, seed=0))
    assert sampled["sequences"] and other.ask("GET", "healthz")[0] == 200


GOOD = written(0, 1)[0]
LOSS = {"loss_fn": "cross_entropy", "data": [GOOD]}
RL = datum([1, 2], [2, 3], logprobs=[-1, -1], advantages=[1, 1])


def changed(**tensors) -> dict:
    return {**RL, "loss_fn_inputs": {**RL["loss_fn_inputs"], **tensors}}


@pytest.mark.parametrize(
    "given, named",
    [
        ({"loss_fn": "gspo"}, "nearest is"),
        ({"loss_fn": "ppo", "data": [datum([1], [2])]}, "needs logprobs"),
        ({"data": []}, "forward_backward_input.data=[] must be a list that is not empty"),
        ({"data": [{**GOOD, "model_input": {"chunks": [{"type": "image", "data": "", "format": "png"}]}}]}, "'image'"),
        ({"data": [datum([99], [1])]}, "99, which is no token"),
        ({"data": [datum([1], [-1])]}, "-1, which is no token"),
        ({"data": [datum(range(1, 3), [1])]}, "has 2 tokens"),
        ({"data": [datum([1] * 65, [1] * 65)]}, "at most 64"),
        ({"loss_fn": "ppo", "data": [changed(advantages={"data": [1, "x"], "dtype": "float32"})]}, "a list of numbers"),
        ({"loss_fn": "ppo", "data": [changed(advantages={"data": [1, 1e300], "dtype": "float32"})]}, "not finite"),
        (
            {"loss_fn": "ppo", "data": [changed(advantages={"data": [1, 1], "dtype": "bool"})]},
            "must be one of 'int64' or 'float32'",
        ),
        ({"loss_fn": "ppo", "data": [changed(mask={"data": [1, 1], "dtype": "float32"})]}, "reads no 'mask'"),
        (
            {"loss_fn": "ppo", "data": [RL], "loss_fn_config": {"clip": 1.0}},
            "no field 'clip'; valid are clip_low_threshold, clip_high_threshold",
        ),
        (
            {"loss_fn": "ppo", "data": [RL], "loss_fn_config": {"clip_low_threshold": 2.0}},
            "at most clip_high_threshold",
        ),
        ({"loss_fn": "dro", "data": [RL]}, "loss_fn_config.beta is missing"),
    ],
)
def test_wrong_passes_are_one_sentence_and_change_nothing(client, given, named):
    body = {"model_id": client.model(), "seq_id": 0, "forward_backward_input": LOSS | given}
    status, told = client.ask("POST", "forward_backward", body)
    assert status == 400 and named in told["detail"] and len(told["detail"]) < 400 and "\n" not in told["detail"]


@pytest.mark.parametrize(
    "path, body, status, named",
    [
        ("create_model", {"base_model": "other", "lora_config": {"rank": 4}}, 404, "the only one is 'demo'"),
        ("create_model", {"base_model": "demo", "lora_config": {"rank": -1}}, 400, "nearest valid value is 0"),
        ("optim_step", {"model_id": "run-0", "adam_params": ADAM}, 404, "no training run"),
        ("optim_step", {"model_id": "run-0", "adam_params": {"beta1": 1.0}}, 400, "below 1"),
        (
            "create_model",
            {"base_model": "demo", "lora_config": {"rank": 4, "seed": 1 << 63}},
            400,
            "9223372036854775807",
        ),
        ("optim_step", {"model_id": "run-0", "adam_params": {"eps": 1e-46}}, 400, "nearest valid value is 1e-30"),
        ("asample", {"prompt": text(SUM), "sampling_session_id": "x", "model_path": "y"}, 400, "says which weights"),
        ("optim_step", {"model_id": "run-0", "adam_params": {"learning_rat": 1}}, 400, "'learning_rate'"),
        ("asample", {"prompt": text(SUM), "sampling_session_id": "x", "seq_id": 0}, 404, "no sampler 'x'"),
        ("create_sampling_session", {"model_path": "tinker://a/weights/b"}, 404, "there is no 'tinker://a/weights/b'"),
        ("create_sampling_session", {}, 400, "exactly one of"),
        ("retrieve_future", {"request_id": "999999"}, 410, "send it again"),
        ("no_such_path", {}, 404, "docs/tinker.md"),
    ],
)
def test_other_wrong_requests_are_one_sentence(client, path, body, status, named):
    own = {"session_id": client.session} if path.startswith("create_") else {}
    found, told = client.ask("POST", path, body | own)
    assert (found, named in told["detail"]) == (status, True), told


@pytest.mark.parametrize(
    "given, named",
    [
        ({"prompt": text([])}, "is empty"),
        ({"prompt": text([1] * 64)}, "beyond the 64 positions"),
        ({"sampling_params": {"max_tokens": 60}}, "the largest valid value is 59"),
        ({"sampling_params": {"temperature": -1}}, "temperature=-1"),
        ({"topk_prompt_logprobs": 3}, "is not served"),
        ({"num_samples": 0}, "nearest valid value is 1"),
    ],
)
def test_wrong_requests_to_sample_are_one_sentence(client, given, named):
    body = {"sampling_session_id": client.sampler(), "seq_id": 0, "prompt": text(SUM)}
    status, told = client.ask("POST", "asample", body | given)
    assert status == 400 and named in told["detail"], told


def test_the_key_is_asked_for(client):
    assert client.ask("GET", "healthz", key="")[0] == 200
    status, told = client.ask("POST", "create_session", {}, key="tml-other")
    assert status == 401 and "TINKER_API_KEY" in told["detail"]
    assert client.ask("POST", "create_session", b"{")[0] == 400


def test_a_session_without_a_sign_ends_and_what_it_named_outlives_the_server(tmp_path):
    with served(tmp_path, idle_s=1.0) as client:
        model = client.model()
        client.passed(model, written(0), "cross_entropy")
        client.train("optim_step", model, adam_params=ADAM)
        path = client.train("save_weights", model, path="named")["path"]
        expected = client.passed(model, written(1), "cross_entropy", backward=False)
        saved = client.train("save_weights_for_sampler", model, sampling_session_seq_id=0)
        assert len(list(tmp_path.rglob("*.safetensors"))) == 2
        service, deadline = client.server.service, time.monotonic() + 60
        while service._sessions and time.monotonic() < deadline:
            time.sleep(0.1)
        assert client.ask("POST", "get_info", {"model_id": model})[0] == 404
        assert client.ask("GET", f"samplers/{saved['sampling_session_id']}")[0] == 404
        other = client.begun()
        other.result(other.sample(other.sampler(), SUM, max_tokens=2, seed=0))  # behind the end of the other session
        assert not service._trainer.runs and len(list(tmp_path.rglob("*.safetensors"))) == 1
    with served(tmp_path) as client:
        model = client.model(seed=3)
        client.train("load_weights", model, path=path, optimizer=False)
        assert client.passed(model, written(1), "cross_entropy", backward=False) == expected
