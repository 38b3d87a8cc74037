"""stories260K, a real pretrained model: its documented greedy story comes out to the character."""

from __future__ import annotations

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from refusals import refused

from jaxrl_post.models import decoder, llama2c
from tests import numpy_llama
from tests.dense_attend import dense


def golden_story(folder: Path) -> str:
    text = (folder / "stories260K.md").read_text()
    return re.search(r"-t 0\.0\n(.*?)\n```", text, re.DOTALL).group(1)


def pieces(folder: Path) -> list[bytes]:
    """The vocabulary of tok512.bin: int32 longest, then per token float32 score, int32 length, bytes."""
    data, out, at = (folder / "tok512.bin").read_bytes(), [], 4
    while at < len(data):
        length = int(np.frombuffer(data[at + 4 : at + 8], "<i4")[0])
        out.append(data[at + 8 : at + 8 + length])
        at += 8 + length
    return out


def spelt(tokens: list[int], vocabulary: list[bytes]) -> str:
    parts = []
    for token in tokens:
        byte = re.fullmatch(rb"<0x([0-9A-F]{2})>", vocabulary[token])
        parts.append(bytes([int(byte[1], 16)]) if byte else vocabulary[token])
    return b"".join(parts).decode().strip()


LENGTH = 257  # BOS and the 256 tokens of the documented story


@pytest.fixture(scope="module")
def story(data_dir) -> tuple[decoder.ModelConfig, dict, np.ndarray, np.ndarray]:
    """The decoder's own greedy story, a full forward pass per token, and its scores [T, V] on it."""
    config, params = llama2c.load(data_dir / "tinystories-260k" / "stories260K.bin")
    positions = jnp.arange(LENGTH)[None]

    def scores(params, tokens):
        h, _ = decoder.hidden(params, config, tokens, positions, dense(positions), ())
        return decoder.logits(params, config, h)

    def longer(at, carry):
        params, tokens = carry
        return params, tokens.at[0, at].set(scores(params, tokens)[0, at - 1].argmax())

    start = jnp.zeros((1, LENGTH), jnp.int32).at[0, 0].set(1)
    _, tokens = jax.jit(lambda p: jax.lax.fori_loop(1, LENGTH, longer, (p, start)))(params)
    return config, params, np.asarray(tokens)[0], np.asarray(jax.jit(scores)(params, tokens))[0]


def test_greedy_decoding_tells_the_documented_story_to_the_character(story, data_dir):
    _, _, tokens, _ = story
    folder = data_dir / "tinystories-260k"
    assert spelt(tokens[1:].tolist(), pieces(folder)) == golden_story(folder)


def test_the_numpy_twin_agrees_on_every_token_and_score_of_the_story(story):
    config, params, tokens, ours = story
    twin = numpy_llama.forward(params, config, tokens)
    # Each prefix's most probable token is the next one: by induction the twin's greedy story is this one.
    assert twin[:-1].argmax(-1).tolist() == tokens[1:].tolist()
    assert np.abs(ours - twin).max() < 1e-4
    exact = numpy_llama.forward(params, config, tokens, dtype=np.float64)
    assert np.abs(ours - exact).max() < 1e-4


def written(path: Path, header: list[int], floats: int) -> Path:
    path.write_bytes(np.array(header, "<i4").tobytes() + np.arange(floats, dtype="<f4").tobytes())
    return path


HEADER = [8, 12, 2, 2, 1, 5, 3]  # embed, ffw, layers, heads, kv_heads, vocab, max_length
LAYER = 8 + 8 * 8 + 2 * 4 * 8 + 8 * 8 + 8 + 3 * 8 * 12
BODY = 5 * 8 + 2 * LAYER + 8 + 2 * 3 * 2


def test_every_number_of_a_file_finds_its_place(tmp_path):
    config, params = llama2c.load(written(tmp_path / "untied.bin", [*HEADER[:5], -5, 3], BODY + 5 * 8))
    assert (config.tied, config.vocab_size, config.head_dim) == (False, 5, 4)
    q = 5 * 8 + 2 * 8  # where wq of layer 0 begins: after the embedding and the norms of both layers
    # Output row 4*n + i of wq is head n, dimension i; pairs (0,1), (2,3) become (0,2), (1,3).
    assert params["layers"]["0"]["q"][3, 1].tolist() == [q + 8 * (4 + i) + 3 for i in (0, 2, 1, 3)]
    o = q + 2 * (64 + 32 + 32)
    assert params["layers"]["1"]["o"][1, 2, 7] == o + 64 + 7 * 8 + 4 + 2
    down = o + 2 * 64 + 2 * 8 + 2 * 96
    assert params["layers"]["1"]["down"][11, 6] == down + 96 + 6 * 12 + 11
    assert params["layers"]["0"]["up"][2, 11] == down + 2 * 96 + 11 * 8 + 2
    assert params["final_norm"].tolist() == [down + 4 * 96 + i for i in range(8)]
    assert params["head"][2, 4] == BODY + 4 * 8 + 2
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {np.dtype("float32")}
    assert jax.tree.map(np.shape, params) == jax.tree.map(lambda leaf: leaf.shape, decoder.abstract(config))


@pytest.mark.parametrize(
    "header, floats, sentence",
    [
        (HEADER, BODY - 1, "the header asks for .* bytes, the file has"),
        (HEADER, BODY + 1, "the header asks for .* bytes, the file has"),
        ([0x616B3432, *HEADER[1:]], BODY, "versioned export"),
        ([8, 12, -2, 2, 1, 5, 3], BODY, "layers=-2"),
        ([8, 12, 2, 3, 1, 5, 3], BODY, "heads=3"),
        (HEADER[:3], 0, "no header of 28 bytes"),
    ],
)
def test_wrong_files_are_refused_in_one_sentence(tmp_path, header, floats, sentence):
    refused(sentence, llama2c.load, written(tmp_path / "bad.bin", header, floats))


def test_a_missing_file_is_named(tmp_path):
    refused("nothing.bin: no such file", llama2c.load, tmp_path / "nothing.bin")


def test_weights_that_are_not_finite_are_refused_with_their_name(tmp_path):
    path = written(tmp_path / "model.bin", HEADER, BODY)
    data = np.frombuffer(path.read_bytes(), "<f4").copy()
    data[7 + 5 * 8 + 8 + 3] = np.inf  # after header, embedding and the norm of the first layer
    path.write_bytes(data.tobytes())
    refused(r"model.bin: tensor attn_norm holds 1 of 16 numbers .* inf at \[1, 3\]", llama2c.load, path)
