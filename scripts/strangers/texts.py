"""Texts and tokens: what the `tokenizers` library's own whole decode and encode, or values set by hand, say of each.

The tokenizers are those of tests/word_kinds.py, one for each kind of decoder, and three tiny random models that
shared/cases/make_models.py makes with transformers in the peers' environment. They sample in Python and behind a server.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import peers
import tokenizers
import word_kinds
from record import Missing

import jaxrl_post
from jaxrl_post.commands import rollouts
from jaxrl_post.data import special_tags, tokenizer
from jaxrl_post.data.continuations import BROKEN, Pieces
from jaxrl_post.ring.types import Finish, Prompt, Rollout, RolloutId, Sampling
from jaxrl_post.serve.server import Server
from strangers import Members
from strangers.conversations import PEER
from strangers.requests import TOKEN, asking, running

ROOT = Path(__file__).resolve().parents[2]
DATA = Path(os.environ.get("JAXRL_DATA", ROOT.parent / "shared" / "data"))
sys.path[:0] = [str(ROOT / "tests")]
SPECIAL = ("<unk>", "<s>", "</s>", "<think>")  # ids 0 to 3 of word_kinds
WORDS = ("the cat", "and the hat", "birds fly", "How many", "fly in the")
MODELS = {"plover": (1, 2), "lark": (0, 4), "quill_eos": (None, 2)}  # the ids of BOS and of the end
SETTINGS = {"engine__slots": 8, "engine__row_sizes": (32,), "engine__max_length": 256, "sampling__max_tokens": 100}
ASKED = ("How many", "Natalia sold", "def add(a, b):", "Q: 2 + 3 =", "She works", "birds ", "a\n", "It costs $5")


def _kinds(folder: Path, **changes: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yields name, tokenizer as read from its file, and the library's own, of every kind. `changes`: of the file alone."""
    for name in word_kinds.NAMES:
        plain = word_kinds.made(name)
        (folder / "tokenizer.json").write_text(json.dumps(json.loads(plain.to_str()) | changes))
        yield name, tokenizer.load(folder), tokenizers.Tokenizer.from_str(plain.to_str())


def _rest(library: Any, before: Sequence[int], ids: Sequence[int], skip: bool = True) -> str:
    """Returns decode(before + ids) minus decode(before), both whole, by the library."""
    head, every = (library.decode([*map(int, one)], skip_special_tokens=skip) for one in (before, [*before, *ids]))
    return every[len(os.path.commonprefix([head, every])) :]  # noqa: RUF071


def _refusal(made: Callable[[], Any], *words: str) -> str | None:
    """Returns what is wrong with a refusal, which must be one sentence with some words."""
    try:
        made()
    except ValueError as error:
        told = str(error)
        good = "\n" not in told and len(told) < 500 and all(word in told for word in words)
        return None if good else f"the refusal was {told[:200]!r}"
    return "it was taken"


def _members(found: Iterator[tuple[str, Any, Any]]) -> Members:
    """Returns what was tried, from what it is, what was got, and what is right."""
    every = list(found)
    return Members(
        len(every), tuple(f"{what}: {got!r} is not {right!r}"[:400] for what, got, right in every if got != right)
    )


def _in_folder(tried: Callable[[Path], Iterator[tuple[str, Any, Any]]]) -> Callable[[], Members]:
    def members() -> Members:
        with tempfile.TemporaryDirectory(prefix="jaxrl_texts_") as name:
            return _members(tried(Path(name)))

    return members


@functools.cache
def _models() -> tempfile.TemporaryDirectory:
    """Returns the folder of the tiny models, made with transformers."""
    maker, rows = (
        DATA.parent / "cases" / "make_models.py",
        next(iter(sorted((DATA / "gsm8k").glob("*train*.jsonl"))), None),
    )
    if not maker.is_file() or rows is None:
        raise Missing(f"{maker} or the rows of GSM8K are not there")
    folder = tempfile.TemporaryDirectory(prefix="jaxrl_models_")
    python = peers.environment(ROOT, "trl", PEER)
    subprocess.run([python, maker, rows, folder.name], check=True, capture_output=True)
    return folder


def _loaded(name: str) -> tuple[Any, Any]:
    place = f"{_models().name}/{name}"
    return jaxrl_post.load(place, **SETTINGS), tokenizers.Tokenizer.from_file(f"{place}/tokenizer.json")


@contextlib.contextmanager
def _served(policy: Any) -> Iterator[Callable[..., tuple[int, Any]]]:
    made = Server(policy, token=TOKEN, say=lambda line: None, name="tiny", queue=24, timeout_s=60.0, parser="hermes")
    with running(made) as port:
        yield asking(port, Authorization=f"Bearer {TOKEN}")


def _streamed(told: str) -> str:
    events = [json.loads(line[6:]) for line in told.splitlines() if line.startswith("data: {")]
    return "".join(choice["text"] for event in events for choice in event.get("choices", ()))


# ---- F04: texts of continuations


def continuations(folder: Path) -> Iterator[tuple[str, Any, Any]]:
    dice = np.random.default_rng(4)
    for name, words, library in _kinds(folder):
        for case in range(40):
            before, ids = (dice.integers(0, words.vocab_size, dice.integers(low, 20)) for low in (1, 0))
            for skip in (True, False):
                what = f"{name} {case}, skip {skip}: {before.tolist()}, {ids.tolist()}"
                yield what, words.decode(ids, skip, before=before), _rest(library, before, ids, skip)
        for case in range(40):
            before, ids = (dice.integers(0, words.vocab_size, size) for size in (4, 12))
            right = _rest(library, before, ids, skip=False)
            if BROKEN not in right:
                yield f"{name}, tokens {case}", "".join(Pieces(words.decode, before).more(ids)), right
    for name in MODELS:
        policy, library = _loaded(name)
        for told in itertools.chain.from_iterable(policy.generate(ASKED, 2, seeds=3)):
            before, ids = told.rollout.prompt.tokens, told.rollout.tokens
            yield f"{name}, generate: {before.tolist()}", told.text, _rest(library, before, ids)
        with _served(policy) as ask:
            yield from _completions(name, ask, library)


def _completions(name: str, ask: Callable, library: Any) -> Iterator[tuple[str, Any, Any]]:
    for prompt in ASKED:
        body = {"prompt": prompt, "seed": 5, "max_tokens": 40, "return_token_ids": True, "logprobs": 0}
        status, told = ask("POST", "/v1/completions", body)
        (one,) = told["choices"]
        right = _rest(library, one["prompt_token_ids"], one["token_ids"])
        shown = _rest(library, one["prompt_token_ids"], one["token_ids"], skip=False)
        yield f"{name}, whole: {prompt!r}", (status, one["text"]), (200, right)
        if BROKEN not in shown:  # a broken byte hides its whole run from the library, and not from the texts of tokens
            yield f"{name}, tokens: {prompt!r}", "".join(one["logprobs"]["tokens"]), shown
        yield (
            f"{name}, streamed: {prompt!r}",
            _streamed(ask("POST", "/v1/completions", body | {"stream": True})[1]),
            right,
        )
        ids = ask("POST", "/tokenize", {"prompt": prompt, "return_token_strs": True})[1]
        yield f"{name}, texts of {prompt!r}", "".join(ids["token_strs"]), library.decode(ids["tokens"], False)


# ---- F16, F34: BOS once, and a written <unk>


def begins(folder: Path) -> Iterator[tuple[str, Any, Any]]:
    """A text that begins with the BOS is taken as it is, and gets no other. Others are as the library has them."""
    front = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
    }
    for name, words, library in _kinds(folder, post_processor=front):
        for text in WORDS:
            for begun in (f"<s>{text}", f"<s> {text}"):
                yield f"{name}: {begun!r}", words.encode(begun), library.encode(begun, add_special_tokens=False).ids
            yield f"{name}: {text!r}", words.encode(text), [1, *library.encode(text, add_special_tokens=False).ids]
    for name, (bos, _) in MODELS.items():
        words = tokenizer.load(f"{_models().name}/{name}")
        text = "" if bos is None else words.model.id_to_token(bos)
        for prompt in ASKED:
            right = words.model.encode(text + prompt, add_special_tokens=False).ids
            yield f"{name}: {text + prompt!r}", words.encode(text + prompt), right


def unknown(folder: Path) -> Iterator[tuple[str, Any, Any]]:
    """A written unknown token is kept; a character that would become one is refused."""
    for name, words, library in _kinds(folder):
        for text in ("the <unk> cat", "<unk>", "the <unk>", "<unk> cat", "the cat <unk> and <unk> hat"):
            right = library.encode(text, add_special_tokens=False).ids
            yield f"{name}: {text!r}", words.encode(text, special=False), right
            yield f"{name}: count of {text!r}", words.encode(text, special=False).count(0), text.count("<unk>")
        if 0 in library.encode("the ж", add_special_tokens=False).ids:
            yield f"{name}: ж", _refusal(lambda: words.encode("the ж"), "no token for 'ж'"), None


# ---- F24, F25: ends


ENDS: tuple[tuple[dict, dict, dict, tuple[int, ...]], ...] = (  # tokenizer_config, generation_config, config, right
    ({}, {}, {}, ()),
    ({}, {}, {"eos_token_id": 2}, (2,)),
    ({}, {}, {"eos_token_id": [2, 0]}, (2, 0)),
    ({}, {}, {"eos_token_id": [3, 2, 0]}, (3, 2, 0)),
    ({}, {}, {"eos_token_id": None}, ()),
    ({}, {}, {"eos_token_id": []}, ()),
    ({}, {}, {"text_config": {"eos_token_id": [1, 3]}}, (1, 3)),
    ({}, {}, {"eos_token_id": 2, "text_config": {"eos_token_id": 3}}, (2,)),
    ({}, {}, {"eos_token_id": None, "text_config": {"eos_token_id": 3}}, (3,)),
    ({}, {"eos_token_id": 3}, {}, (3,)),
    ({}, {"eos_token_id": [3, 2]}, {"eos_token_id": [2, 0]}, (3, 2)),
    ({}, {"eos_token_id": None}, {"eos_token_id": [2, 0]}, (2, 0)),
    ({}, {"temperature": 0.6}, {"eos_token_id": [2, 0]}, (2, 0)),
    ({"eos_token": "</s>"}, {}, {}, (2,)),
    ({"eos_token": "</s>"}, {}, {"eos_token_id": [2, 0]}, (2, 0)),
    ({"eos_token": "</s>"}, {}, {"eos_token_id": [0, 3]}, (0, 3, 2)),
    ({"eos_token": "</s>"}, {"eos_token_id": [0, 3]}, {"eos_token_id": 1}, (0, 3, 2)),
    ({"eos_token": {"content": "</s>", "special": True}}, {}, {"eos_token_id": [3]}, (3, 2)),
    ({"eos_token": None}, {}, {"eos_token_id": [3, 3]}, (3,)),
    ({"eos_token": "<think>"}, {"eos_token_id": 3}, {"eos_token_id": 0}, (3,)),
    ({"eos_token": "no such token"}, {"eos_token_id": 2}, {}, (2,)),
    ({}, {}, {"eos_token_id": 0}, (0,)),
)


def ends_of_files(folder: Path) -> Iterator[tuple[str, Any, Any]]:
    word_kinds.made("byte_level").save(str(folder / "tokenizer.json"))
    for *files, right in ENDS:
        for name, value in zip(("tokenizer_config", "generation_config", "config"), files, strict=True):
            (folder / f"{name}.json").write_text(json.dumps(value))
        yield f"{files}", tokenizer.load(folder).eos_ids, right
    policy, _ = _loaded("quill_eos")
    yield "quill_eos", policy.sampling.eos_ids, (2, 0)
    open_end = {name: tuple(one.rollout.tokens.tolist() for one in made) for name, made in _both(policy).items()}
    for number, (free, ended) in enumerate(zip(open_end["free"], open_end["ended"], strict=True)):
        yield f"quill_eos {number}", ended, _cut(free, (2, 0))
    with _served(policy) as ask:
        for seed in range(8):
            body = {"prompt": "How many", "seed": seed, "max_tokens": 200, "temperature": 1.0, "return_token_ids": True}
            (one,) = ask("POST", "/v1/completions", body)[1]["choices"]
            reason = "stop" if one["token_ids"][-1] in (2, 0) else "length"
            yield (
                f"quill_eos, served {seed}",
                (one["token_ids"], one["finish_reason"]),
                (_cut(one["token_ids"], (2, 0)), reason),
            )


def _both(policy: Any) -> dict[str, list]:
    """Returns rollouts with the model's ends and without any, of the same noise."""
    laws = {"free": Sampling(), "ended": None}
    return {name: [one for (one, *_) in policy.generate(ASKED * 2, 1, law, 7, 200)] for name, law in laws.items()}


def _cut(ids: list[int], ends: Sequence[int]) -> list[int]:
    """Returns the ids up to the first that ends them."""
    return ids[: next((at + 1 for at, one in enumerate(ids) if one in ends), len(ids))]


def stops(folder: Path) -> Iterator[tuple[str, Any, Any]]:
    from jaxrl_post.data import ends

    for name, words, _ in _kinds(folder):
        for id in (
            words.special_ids if name != "ctc" else ()
        ):  # CTC's decoder shows no <s>, and no language model has it
            text = SPECIAL[id]
            for others in ((), ("cat",)):
                law = ends.with_special_stops(Sampling(stop_strings=(text, *others)), words)
                yield f"{name}: {text}", law.stop_ids, (id,)
            for beside in (f"{text}\n", f"a{text}", f"{text} {text}"):
                made = functools.partial(ends.with_special_stops, Sampling(stop_strings=(beside,)), words)
                yield f"{name}: {beside!r}", _refusal(made, "special token", f"name {id} in stop_ids"), None
    yield "an empty one", _refusal(lambda: Sampling(stop_strings=("",)), "at least 1 character"), None
    policy, library = _loaded("quill_eos")
    free = [one.rollout.tokens.tolist() for one in _both(policy)["free"]]
    for id in range(3):
        text = library.id_to_token(id)
        made = policy.generate(ASKED * 2, 1, Sampling(stop_strings=(text,)), 7, 200)
        for number, ((one,), plain) in enumerate(zip(made, free, strict=True)):
            yield f"quill_eos {number}, {text}", one.rollout.tokens.tolist(), _cut(plain, (id,))
    with _served(policy) as ask:
        for seed in range(12):
            body = {"prompt": "How many", "seed": seed, "max_tokens": 200, "return_token_ids": True}
            plain, named = (
                ask("POST", "/v1/completions", body | more)[1]["choices"][0]
                for more in ({"stop_token_ids": [1]}, {"stop": "<|im_start|>"})
            )
            same = ("token_ids", "text", "finish_reason")
            yield f"quill_eos, served {seed}", [named[key] for key in same], [plain[key] for key in same]
        for bad in ("<|im_end|>\n", ["a", "x<|im_start|>"], [""], "\ufffd"):
            status, told = ask("POST", "/v1/completions", {"prompt": "a", "stop": bad})
            yield f"quill_eos, stop={bad!r}", (status, told["error"]["param"]), (400, "stop")


# ---- F26, T15: special tokens in the texts of graders and of the command rollouts


def shown_tags(folder: Path) -> Iterator[tuple[str, Any, Any]]:
    dice = np.random.default_rng(26)
    for name, words, library in _kinds(folder):
        for case in range(4):
            before, ids = dice.integers(4, words.vocab_size, 5), dice.integers(4, words.vocab_size, 6).tolist()
            ids = [*ids[:2], *([3] if 3 in words.special_ids else [1]), *ids[2:]]
            for end in ([], [2]):
                for skip in (True, False):
                    got = special_tags.graded(words, (2,), skip=skip)([*ids, *end], before=before)
                    right = _rest(library, before, [*ids, *end] if skip else ids, skip)
                    yield f"{name} {case}: {ids}, end {end}, skip {skip}", got, right


def speakers(folder: Path) -> Iterator[tuple[str, Any, Any]]:
    dice = np.random.default_rng(15)
    for name, words, library in _kinds(folder):
        for case in range(4):
            ids, sampled = dice.integers(0, words.vocab_size, 24), dice.integers(0, 2, 24).astype(bool)
            prompt = Prompt.of_tokens(dice.integers(4, words.vocab_size, 5))
            zeros, whole = np.zeros(24, np.float32), np.zeros(24, np.int32)
            same = dict(logprobs=zeros, entropies=zeros, versions=whole, drafted=np.zeros(24, bool))
            about = dict(id=RolloutId(0, "eval", 0, prompt.id, 0), finish=Finish.LENGTH, start_clock=0, finish_clock=1)
            made = rollouts.spans(Rollout(prompt=prompt, tokens=ids, sampled=sampled, **same, **about), words.decode)
            right, before = [], prompt.tokens.tolist()
            for own, run in itertools.groupby(zip(sampled.tolist(), ids.tolist()), key=lambda pair: pair[0]):
                here = [id for _, id in run]
                right.append({"sampled": own, "text": _rest(library, before, here, skip=False)})
                before += here
            yield f"{name} {case}", made, right


# ---- A05, A12: what a tokenizer.json asks for


def cuts(folder: Path) -> Iterator[tuple[str, Any, Any]]:
    pad = {"direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0, "pad_token": "<unk>"}
    way = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    changes = [
        {"truncation": way | {"direction": side, "max_length": most}} for side in ("Left", "Right") for most in (0, 3)
    ]
    changes += [{"padding": pad | {"strategy": size}} for size in ("BatchLongest", {"Fixed": 10}, {"Fixed": 1000})]
    changes += [{"padding": pad | {"strategy": {"Fixed": 100_000_000}, "direction": "Left"}}]
    changes += [{"padding": pad | {"strategy": "BatchLongest", "pad_to_multiple_of": 64}, "truncation": way}]
    for change in changes:
        for name, words, library in _kinds(folder, **change):
            text = "the cat and the hat"
            yield f"{name}: {change}", words.encode(text), library.encode(text).ids


def _bombs() -> Iterator[dict[str, Any]]:
    """Yields changes of a tokenizer.json that ask for memory or time without bound."""
    letter, long = {"String": "a"}, "b" * 50_000_000
    for room, parts in (("normalizer", "normalizers"), ("decoder", "decoders")):
        yield {room: {"type": "Replace", "pattern": letter, "content": long}}
        for pattern, grown in ((letter, "aa"), (letter, "a" * 65), ({"Regex": ""}, "a"), ({"Regex": "a*"}, "aa")):
            one = {"type": "Replace", "pattern": pattern, "content": grown}
            yield {room: {"type": "Sequence", parts: [one] * 40}}
            nested = {"type": "Sequence", parts: [one] * 20}
            yield {room: {"type": "Sequence", parts: [nested, nested]}}
        yield {room: {"type": "Sequence", parts: [{"type": "Fuse"} if room == "decoder" else {"type": "NFC"}] * 9000}}
    yield {"normalizer": {"type": "Prepend", "prepend": long}}
    yield {"normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "a" * 4000}] * 40}}
    yield {"decoder": {"type": "Strip", "content": " ", "start": 0, "stop": 5}}
    twice = [{"Sequence": {"id": "A", "type_id": 0}}] * 1000
    yield {"post_processor": {"type": "TemplateProcessing", "single": twice, "pair": [], "special_tokens": {}}}
    yield {"added_tokens": [{"id": 0, "content": "a" * 1_000_000}]}


def bombs(folder: Path) -> Iterator[tuple[str, Any, Any]]:
    plain = json.loads(word_kinds.made("llama2").to_str())
    for number, change in enumerate(_bombs()):
        (folder / "tokenizer.json").write_text(json.dumps(plain | change))
        yield f"bomb {number}, {str(change)[:80]}", _refusal(lambda: tokenizer.load(folder), *change), None
    for name, words, _ in _kinds(folder):
        yield f"{name} is read", bool(words.encode("the cat")), True


KINDS: dict[str, Callable[[], Members]] = {
    "F04": _in_folder(continuations),
    "F16": _in_folder(begins),
    "F24": _in_folder(ends_of_files),
    "F25": _in_folder(stops),
    "F26": _in_folder(shown_tags),
    "F34": _in_folder(unknown),
    "T15": _in_folder(speakers),
    "A05": _in_folder(cuts),
    "A12": _in_folder(bombs),
}
