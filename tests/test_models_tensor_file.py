"""Reading and writing safetensors one tensor at a time, against the library of that name."""

from __future__ import annotations

import itertools
import json

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from refusals import refused

from jaxrl_post.models import tensor_file


def arrays(dtype) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(0)
    return {
        name: generator.standard_normal(shape).astype(dtype)
        for name, shape in (("b", (3, 5)), ("a", (7,)), ("scalar", ()), ("empty", (0, 4)))
    }


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16])
def test_both_read_what_the_other_wrote(tmp_path, dtype):
    given = arrays(dtype)
    safetensors.numpy.save_file(given, tmp_path / "theirs.safetensors", metadata={"format": "pt"})
    found = tensor_file.entries(tmp_path / "theirs.safetensors")
    assert sorted(found) == sorted(given)
    for name, value in given.items():
        ours = tensor_file.read(found[name])
        assert ours.dtype == value.dtype and ours.shape == value.shape and ours.tobytes() == value.tobytes()
    turned = {name: value.copy(order="F") for name, value in given.items()}
    tensor_file.write(
        tmp_path / "ours.safetensors",
        {name: value.shape for name, value in given.items()},
        np.dtype(dtype),
        iter(turned.values()),
    )
    theirs = safetensors.numpy.load_file(tmp_path / "ours.safetensors")
    assert all(theirs[name].dtype == value.dtype for name, value in given.items())
    assert all(np.array_equal(theirs[name], value) for name, value in given.items())
    with safetensors.safe_open(tmp_path / "ours.safetensors", "numpy") as opened:
        assert opened.metadata() == {"format": "pt"}


@pytest.mark.parametrize("shape", [(6,), (4, 6), (3, 4, 5)])
def test_a_box_of_a_tensor_is_its_slice(tmp_path, shape):
    value = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    safetensors.numpy.save_file({"before": np.ones(3, np.float32), "x": value}, tmp_path / "file")
    entry = tensor_file.entries(tmp_path / "file")["x"]
    sides = [[slice(a, b) for a in range(size) for b in range(a + 1, size + 1)][::2] for size in shape]
    for box in itertools.islice(itertools.product(*sides), 0, None, 3):
        assert np.array_equal(tensor_file.read(entry, box), value[box])


def test_same_compares_every_byte(tmp_path, monkeypatch):
    monkeypatch.setattr(tensor_file, "_BLOCK", 16)
    one = np.arange(30, dtype=np.float32)
    other = one.copy()
    other[-1] += 1
    safetensors.numpy.save_file(
        {"one": one, "again": one.copy(), "other": other, "wide": one.reshape(5, 6)}, tmp_path / "file"
    )
    found = tensor_file.entries(tmp_path / "file")
    assert tensor_file.same(found["one"], found["again"])
    assert not tensor_file.same(found["one"], found["other"]) and not tensor_file.same(found["one"], found["wide"])


def written(header: dict | bytes, payload: bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + payload


def one(**changes) -> dict:
    return {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | changes}


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"1234567",
        (1 << 40).to_bytes(8, "little") + b"{}",
        written(b"{nonsense", b""),
        written(b"[]", b""),
        written(one(), b"1234567"),
        written(one(), b"123456789"),
        written(one(shape=[3]), b"12345678"),
        written(one(dtype="F7"), b"12345678"),
        written(one(shape=[-2]), b"12345678"),
        written(one(data_offsets=[1, 9]), b"123456789"),
        written({"a": {}}, b""),
        written({"a": 3}, b""),
        written({**one(), "b": one()["a"]}, b"12345678"),
    ],
    ids=[
        "nothing",
        "short",
        "long_header",
        "no_json",
        "no_object",
        "cut",
        "too_long",
        "shape",
        "dtype",
        "negative",
        "gap",
        "no_keys",
        "no_entry",
        "overlap",
    ],
)
def test_files_that_are_not_whole_are_refused_in_one_sentence(tmp_path, data):
    (tmp_path / "file").write_bytes(data)
    refused("not a whole safetensors file", tensor_file.entries, tmp_path / "file")


def test_a_file_that_shrinks_while_it_is_read_is_noticed(tmp_path):
    (tmp_path / "file").write_bytes(written(one(), b"12345678"))
    found = tensor_file.entries(tmp_path / "file")
    (tmp_path / "file").write_bytes(written(one(), b"1234"))
    refused("it ended while it was read", tensor_file.read, found["a"])


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("number", [np.nan, -np.nan, np.inf, -np.inf])
def test_a_number_that_is_not_finite_is_named(monkeypatch, dtype, number):
    monkeypatch.setattr(tensor_file, "_BLOCK", 4)
    value = np.array([[0.0, -0.0, 1e-7, -3e4], [6e4, 1, 2, 3], [5, 6, 7, 8]]).astype(dtype)
    tensor_file.refuse_not_finite("model FILE", "w", value)
    tensor_file.refuse_not_finite("model FILE", "w", value[:, :0])
    value[1, 2] = value[2, 3] = number
    with pytest.raises(ValueError, match=r"model FILE: tensor w holds 2 of 12 numbers .* is -?(nan|inf) at \[1, 2\]"):
        tensor_file.refuse_not_finite("model FILE", "w", value)


@pytest.mark.parametrize(
    "changes",
    [dict(shape=[2.0]), dict(shape=None), dict(dtype=[]), dict(dtype={}), dict(shape=[10**400]), dict(shape=[1 << 63])],
)
def test_a_header_of_wrong_types_is_one_sentence(tmp_path, changes):
    (tmp_path / "file").write_bytes(written(one(**changes), b"12345678"))
    caught = refused("not a whole safetensors file", tensor_file.entries, tmp_path / "file")
    assert len(caught) < 500


def test_a_header_that_no_json_reader_takes_is_one_sentence(tmp_path):
    for header in (b"[" * 9000 + b"]" * 9000, b"\xff" * 9000, b'{"a": 1' + b"0" * 9000 + b"}"):
        (tmp_path / "file").write_bytes(written(header, b""))
        caught = refused("not a whole safetensors file", tensor_file.entries, tmp_path / "file")
        assert len(caught) < 500
