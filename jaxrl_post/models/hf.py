"""Reads and writes Hugging Face directories: config.json and model.safetensors, or several files with an index.

Tensors are read one by one, the largest first, and placed at once. Of several processes each reads the ranges of its
own devices alone. So loading needs little memory beyond the result. Saving gathers one tensor at a time, which process
0 writes: of a stack of experts one matrix, unless the file has stacks. Families and their names of tensors: models/families.py.

Invariants:
- Every tensor is used or refused. The exceptions: what a file holds twice, what no layer reads (families.unread), and a
  checkpoint's other parts (models/text_part.py), which are written again as they are.
- A directory appears whole or not at all.

Refuses quantised weights but MXFP4 (models/mxfp4.py), and pickled weights (a pickle can run code) with a hint how to convert them.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import json
import math
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util

from jaxrl_post.models import families, mxfp4, tensor_file, text_part
from jaxrl_post.models.families import Leaf, Tensor
from jaxrl_post.models.model_config import ModelConfig
from jaxrl_post.models.tensor_file import Entry
from jaxrl_post.parallel import exchange, processes, relayout
from jaxrl_post.ring import json_text, written
from jaxrl_post.ring.json_text import said, shown

DTYPES = ("float32", "bfloat16", "float16")
_PICKLED = (".bin", ".pt", ".pth", ".ckpt")
_ONE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_LARGEST_INDEX = 1 << 26  # bytes
_OWN = ("config.json", "generation_config.json", _ONE, _INDEX)


def load(directory: str | Path, *, dtype: Any = np.float32, shardings: Any = None) -> tuple[ModelConfig, dict]:
    """Returns the shape and the params of a Hugging Face directory.

    Args:
      dtype: what every tensor is cast to; None keeps the files' dtype.
      shardings: placement of each leaf as soon as it is read: a tree like params, or one sharding for all. Every
        process gives the same, and fails where one of them does. None: host numpy.

    Raises:
      ValueError: a directory or file is missing, or an architecture or format is not read. Or a tensor is missing,
        left over, of another shape than config.json says, or holds a number that is not finite. One sentence with name,
        shape and expected shape.
    """
    if shardings is None or jax.process_count() == 1:
        return _loaded(Path(directory), dtype, shardings)
    found, failure = None, ""
    try:
        found = _loaded(Path(directory), dtype, shardings)
    except (ValueError, OSError) as error:
        failure = str(error)
    told = exchange.first_text(failure)
    if told or found is None:
        raise ValueError(told)
    return found


def _loaded(directory: Path, dtype: Any, shardings: Any) -> tuple[ModelConfig, dict]:
    if not directory.is_dir():
        raise ValueError(f"model {directory}: no such directory")
    config = read_config(directory / "config.json")
    entries = text_part.entries(_entries(directory), _whole(directory))
    expected, present = families.tensors(config), families.by_hub_names(config, entries)
    _matching(directory, config, expected, present)
    sources = {
        path: [_Source(present[name], name, expected[name], leaf, dtype) for name, leaf in own.items()]
        for path, own in _by_leaf(expected).items()
    }
    leaves = {}
    # The largest first: its temporary copy then adds least to the leaves that are loaded already.
    for path in sorted(sources, key=lambda path: -sum(source.entry.bytes for source in sources[path])):
        leaves[path] = _leaf(sources[path], None if shardings is None else _at(shardings, path))
    return config, traverse_util.unflatten_dict(leaves)


def _by_leaf(tensors: Mapping[str, Tensor]) -> dict[tuple[str, ...], dict[str, Leaf]]:
    """Returns each leaf by the names of its tensors: one, or one for each entry of its first axis, in order."""
    out: dict[tuple[str, ...], dict[str, Leaf]] = {}
    for name, tensor in tensors.items():
        for leaf in tensor.leaves:
            out.setdefault(leaf.path, {})[name] = leaf
    return out


def stored_dtype(directory: str | Path) -> str:
    """Returns the dtype in which a trained policy of this model is saved: bfloat16 where all its weights have that.

    Else it is float32, also for float16: trained weights may be beyond its range. Raises ValueError as `load` does,
    but not where there are no weights yet.
    """
    types = {entry.type for entry in _present(Path(directory)).values()}
    # Bytes are MXFP4, whose numbers are exact in bfloat16. Others are refused when they are read.
    return "bfloat16" if types and types <= {"BF16", "U8"} else "float32"


def remarks(directory: str | Path) -> list[str]:
    """Returns a sentence for each way in which an export differs in form from this directory. A llama2.c file has none."""
    out, present = [], _present(Path(directory))
    if whole := _whole(Path(directory)):
        text = text_part.TEXT_MODELS[whole]
        out.append(
            f"model {directory}: the text model of {whole} is trained, as {text}; its other parts are saved as they are"
        )
    elif any(name.startswith(text_part.PROPOSING) for name in present):
        out.append(
            f"model {directory}: its layers {text_part.PROPOSING}*, which propose several tokens at once, are not trained; they "
            "are saved as they are"
        )
    if any(entry.type == "U8" for entry in present.values()):
        out.append(
            f"model {directory}: its MXFP4 weights are exact in bfloat16, and are trained and saved without MXFP4"
        )
    return out


def other_parts(directory: str | Path) -> text_part.OtherParts | None:
    """Returns what a directory has beside its text model, for `save`. None: nothing, or it has no weights yet."""
    directory = Path(directory)
    present = _present(directory)
    if not present:
        return None
    file = directory / "config.json"
    unread = families.unread(read_config(file))
    return text_part.others(directory, json_text.read_object(file, f"model {file}"), present, unread)


def _whole(directory: Path) -> str:
    file = directory / "config.json"
    return text_part.whole(json_text.read_object(file, f"model {file}")) if file.is_file() else ""


def _present(directory: Path) -> dict[str, Entry]:
    """Returns the tensors of a directory, or none where it has no weights yet."""
    there = any((directory / name).is_file() for name in (_ONE, _INDEX))
    return _entries(directory) if there else {}


def read_config(file: str | Path) -> ModelConfig:
    """Returns the shape that a config.json describes, in either spelling. Raises ValueError as in `load`."""
    return families.read(Path(file))


def check_savable(config: ModelConfig) -> None:
    """Raises an error for a config that `save` cannot write. Call it before a run trains such a model."""
    families.write(config)


class _Source:
    """A leaf's numbers in one tensor of the files. They are finite there, and where the cast could overflow after it."""

    def __init__(self, entry: Entry | mxfp4.Packed, name: str, tensor: Tensor, leaf: Leaf, dtype: Any):
        self.entry, self.tensor, self.leaf = entry, tensor, leaf
        stored = tensor_file.FLOATS[entry.type]
        self.kept = stored if dtype is None else np.dtype(dtype)
        where = f"model {entry.file}"
        self._in_file, self._cast = tensor_file.Finite(where, name), tensor_file.Finite(where, name)
        self._overflows = jnp.finfo(self.kept).max < jnp.finfo(stored).max

    def read(self, index: relayout.Index) -> np.ndarray:
        """Returns a piece of what the leaf is in params. Looks through its numbers for `refuse`."""
        box = _box(self.leaf, index)
        value = self._read(box) if len(self.tensor.leaves) == 1 else self._own(box)
        # Transposed before the cast: the file's dtype has usually fewer bytes.
        outputs = int(self.leaf.stack)
        value = np.ascontiguousarray(np.moveaxis(value, outputs, -1)) if self.leaf.transposed else value
        with np.errstate(over="ignore"):  # what overflows is refused by its tensor's name
            piece = value.reshape(_sizes(index)).astype(self.kept, copy=False)
        if self._overflows:
            self._cast.add(piece, index)
        return piece

    def _read(self, box: tensor_file.Box) -> np.ndarray:
        value = (
            mxfp4.read(self.entry, box) if isinstance(self.entry, mxfp4.Packed) else tensor_file.read(self.entry, box)
        )
        self._in_file.add(value, box)
        return value

    def _own(self, box: tensor_file.Box) -> np.ndarray:
        """Returns a box of the leaf's own numbers, of a tensor that holds several leaves."""
        axis, groups = self.tensor.axis, self.tensor.groups
        own, each = (shape[axis] // groups for shape in (self.leaf.shape, self.tensor.shape))
        before = self.tensor.leaves[: self.tensor.leaves.index(self.leaf)]
        start = sum(leaf.shape[axis] for leaf in before) // groups
        side = box[axis]
        if groups == 1:
            return self._read((*box[:axis], slice(side.start + start, side.stop + start), *box[axis + 1 :]))
        out = np.empty(_sizes(box), tensor_file.FLOATS[self.entry.type])
        if axis == 0:  # neighbouring bytes, of one stretch at a time
            for group in range(side.start // own, -(-side.stop // own)):
                first, stop = max(side.start, group * own), min(side.stop, (group + 1) * own)
                there = group * each + start - group * own
                rows = self._read((slice(first + there, stop + there), *box[1:]))
                out[first - side.start : stop - side.start] = rows
            return out
        # Else single numbers take turns: those of all leaves are read, of one entry of the first axis at a time.
        assert own == 1 and axis == len(box) - 1, (axis, own, box)
        (first_axis, *others, _) = box
        for at, entry in enumerate(range(first_axis.start, first_axis.stop)):
            every = self._read((slice(entry, entry + 1), *others, slice(each * side.start, each * side.stop)))
            out[at] = every[0, ..., start::each]
        return out

    def refuse(self) -> None:
        """Refuses the tensor where a number of a piece that was read is not finite."""
        self._in_file.refuse()
        self._cast.refuse()


def _leaf(sources: list[_Source], sharding: jax.sharding.Sharding | None) -> Any:
    """Returns a leaf in host memory, or on devices: of one tensor, or of one for each entry of its first axis.

    Of several tensors one at a time is in memory beside the piece that they fill.
    """
    first, several = sources[0], sources[0].leaf.part is not None
    shape = (len(sources), *first.leaf.ours) if several else first.leaf.ours
    kept = functools.reduce(jnp.promote_types, (source.kept for source in sources))

    def read(index: relayout.Index) -> np.ndarray:
        if not several:
            return first.read(index)
        out = np.empty(_sizes(index), kept)
        for entry, source in zip(out, sources[index[0]], strict=True):
            entry[...] = source.read(index[1:])
        return out

    whole = tuple(slice(0, size) for size in shape)
    leaf = read(whole) if sharding is None else relayout.placed(shape, kept, sharding, read)
    for source in sources:
        source.refuse()
    return leaf


def _sizes(index: relayout.Index) -> tuple[int, ...]:
    return tuple(side.stop - side.start for side in index)


def _box(leaf: Leaf, index: relayout.Index) -> tensor_file.Box:
    """Returns where a piece of a leaf lies in the files, among the leaf's own numbers."""
    ones = (slice(0, 1),) * (len(leaf.shape) - 1)
    if not leaf.transposed:
        return index if leaf.shape == leaf.ours else (*ones, _joined(leaf.ours, index))
    if leaf.stack:
        return index[0], index[2], index[1]
    inputs = next(at for at in range(1, len(index)) if math.prod(leaf.ours[:at]) == leaf.shape[-1])
    return (_joined(leaf.ours[inputs:], index[inputs:]), *ones[1:], _joined(leaf.ours[:inputs], index[:inputs]))


def _joined(shape: tuple[int, ...], index: relayout.Index) -> slice:
    """Returns a piece of several dimensions as one of all of them together."""
    assert all((side.start, side.stop) == (0, size) for side, size in zip(index[1:], shape[1:])), (shape, index)
    each = math.prod(shape[1:])
    return slice(index[0].start * each, index[0].stop * each)


def _at(tree: Any, path: tuple[str, ...]) -> Any:
    for name in path:
        if not isinstance(tree, Mapping):
            break
        tree = tree[name]
    return tree


def _entries(directory: Path) -> dict[str, Entry]:
    if (directory / _ONE).is_file():
        return tensor_file.entries(directory / _ONE)
    if (directory / _INDEX).is_file():
        return _indexed(directory)
    pickled = sorted(path.name for path in directory.iterdir() if path.suffix in _PICKLED)
    if pickled:
        raise ValueError(
            f"model {directory}: {pickled[0]} is a pickle, which can run code, and is not read; convert "
            f"it where torch and transformers are installed, with transformers.AutoModelForCausalLM"
            f".from_pretrained({str(directory)!r}, dtype='auto').save_pretrained('NEW DIRECTORY')"
        )
    raise ValueError(f"model {directory}: no {_ONE} in it, and no {_INDEX}")


def _indexed(directory: Path) -> dict[str, Entry]:
    file = directory / _INDEX
    index = json_text.read_object(file, f"model {file}", _LARGEST_INDEX).get("weight_map")
    if not isinstance(index, Mapping) or not all(isinstance(part, str) for part in index.values()):
        raise ValueError(f"model {file}: weight_map must be an object of file names")
    out: dict[str, Entry] = {}
    files = {path.name for path in directory.iterdir() if path.is_file()}
    for part in sorted(set(index.values())):
        if part not in files:
            raise ValueError(f"model {file}: it names {shown(part)}, which is no file of this directory")
        found = tensor_file.entries(directory / part)
        named = {name for name, where in index.items() if where == part}
        for name in sorted(named ^ set(found)):
            raise ValueError(
                f"model {file}: tensor {said(name)} is {'in' if name in found else 'not in'} {part}, and the "
                f"index says otherwise"
            )
        out |= found
    return out


def _matching(directory: Path, config: ModelConfig, expected: Mapping[str, Tensor], given: Mapping[str, Entry]) -> None:
    """Refuses tensors that are not what `config` says."""
    # Old exports hold the rotation's frequencies, and tied ones sometimes the embedding twice. Both are redundant. Google's have
    # keys and values of layers that read those of others.
    present = {name for name in given if not name.endswith("rotary_emb.inv_freq")} - families.unread(config)
    if config.tied and "lm_head.weight" in present:
        two = [given[name] for name in ("lm_head.weight", "model.embed_tokens.weight") if name in present]
        # Reads both whole, so process 0 does it for all.
        if len(two) < 2 or (jax.process_index() == 0 and not tensor_file.same(*two)):
            raise ValueError(
                f"model {directory}: config.json says tie_word_embeddings, but lm_head.weight differs "
                f"from model.embed_tokens.weight"
            )
        present.remove("lm_head.weight")
    for name in sorted(present ^ set(expected)):
        what = f"is missing; expected shape {expected[name].shape}" if name in expected else ""
        what = what or f"of shape {shown(given[name].shape)} is not part of this architecture"
        raise ValueError(f"model {directory}: tensor {said(name)} {what}")
    for name, tensor in expected.items():
        tensor_file.refuse_other(given[name], name, tensor.shape)


def read_leaf(entry: Entry, name: str, tensor: Tensor, leaf: Leaf, dtype: Any) -> np.ndarray:
    """Reads a leaf of params, or one entry of it, from its tensor. Its numbers are finite as `load` wants them."""
    alone = leaf._replace(part=None)
    own = tensor._replace(leaves=tuple(alone if one is leaf else one for one in tensor.leaves))
    return _leaf([_Source(entry, name, own, alone, dtype)], None)


def save(
    directory: str | Path,
    config: ModelConfig,
    params: Mapping,
    *,
    dtype: str = "float32",
    tokenizer_files: Iterable[str | Path] = (),
    eos_ids: tuple[int, ...] = (),
    bos_id: int | None = None,
    others: text_part.OtherParts | None = None,
    max_file_bytes: int = 5_000_000_000,
) -> None:
    """Writes a directory that Hugging Face tools load: weights in `dtype`, config, and copies of `tokenizer_files`.

    The whole directory appears at once under its name and replaces an earlier export. Weights saved as float32 are
    read back bit for bit. Weights of more than `max_file_bytes` go into several files with an index. Every process
    calls this with its part of the arrays, and process 0 writes. One tensor at a time is gathered. A process without any
    part gives ShapeDtypeStructs.

    `others`: of the checkpoint that the policy began with. They are copied byte for byte, and the directory has that
    checkpoint's form again.

    Raises:
      ValueError: no family expresses the variant, or params have another shape than config says. Or a tokenizer file
        is missing, or the directory exists and is no export.
    """
    directory = Path(directory)
    files = [Path(file) for file in tokenizer_files]
    about = families.write(config) | {"torch_dtype": dtype, **_ids(eos_ids, bos_id)}
    _writable(directory, dtype, files)
    tensors, copied = families.tensors(config), others.tensors if others else {}
    _complete(tensors, params)
    if others:
        about = others.whole_config(dtype)
        tensors = {others.whole_name(name): tensor for name, tensor in tensors.items()}
        files += others.files
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(params)):
        return
    values = as_in_files(tensors, params, jnp.dtype(dtype))
    if jax.process_index() != 0:
        collections.deque(values, 0)
        return
    try:
        with replacing(directory) as made:
            _write_tensors(made, tensors, values, jnp.dtype(dtype), max_file_bytes, copied)
            _write_json(made / "config.json", about)
            _write_json(made / "generation_config.json", _ids(eos_ids, bos_id))
            for file in files:
                shutil.copyfile(file, made / file.name)
    finally:
        collections.deque(values, 0)  # after an error: the other processes wait for each tensor


def _writable(directory: Path, dtype: str, files: list[Path]) -> None:
    if dtype not in DTYPES:
        raise ValueError(f"model {directory}: dtype={dtype!r} is not one of {', '.join(DTYPES)}")
    for file in files:
        if not file.is_file():
            raise ValueError(f"model {directory}: tokenizer file {file} does not exist")
        if file.name in _OWN:
            raise ValueError(f"model {directory}: tokenizer file {file} has the name of a file that the export writes")
    if directory.exists() and not (directory / "config.json").is_file():
        raise ValueError(
            f"model {directory}: it exists and holds no config.json, so it is no export to be replaced; "
            f"name a new directory"
        )


def _complete(tensors: Mapping[str, Tensor], params: Mapping) -> None:
    for path, own in _by_leaf(tensors).items():
        name, leaf = next(iter(own.items()))
        expected = leaf.ours if leaf.part is None else (len(own), *leaf.ours)
        try:
            shape = np.shape(_at(params, path))
        except KeyError:
            raise ValueError(
                f"model: params have no {'.'.join(path)}, needed for {name} {tensors[name].shape}"
            ) from None
        if shape != expected:
            raise ValueError(f"model: params {'.'.join(path)} has shape {shape}, expected {expected}")


def _write_tensors(
    made: Path,
    tensors: Mapping[str, Tensor],
    values: Iterator[np.ndarray],
    dtype: np.dtype,
    limit: int,
    copied: Mapping[str, Entry],
) -> None:
    """Writes one file, or several with an index, each of at most `limit` bytes (or one tensor). `copied`: behind the others."""
    parts, room = [[]], limit
    sizes = {name: int(np.prod(tensor.shape)) * dtype.itemsize for name, tensor in tensors.items()}
    sizes |= {name: entry.bytes for name, entry in copied.items()}
    for name, size in sizes.items():
        if size > room and parts[-1]:
            parts.append([])
            room = limit
        parts[-1].append(name)
        room -= size
    several = [f"model-{at:05}-of-{len(parts):05}.safetensors" for at in range(1, len(parts) + 1)]
    files = several if len(parts) > 1 else [_ONE]
    for file, names in zip(files, parts, strict=True):
        shapes = {name: tensors[name].shape for name in names if name in tensors}
        there = {name: copied[name] for name in names if name in copied}
        tensor_file.write(made / file, shapes, dtype, itertools.islice(values, len(shapes)), there)
    if len(parts) > 1:
        where = {name: file for file, names in zip(files, parts, strict=True) for name in names}
        _write_json(made / _INDEX, {"metadata": {"total_size": sum(sizes.values())}, "weight_map": where})


def as_in_files(tensors: Mapping[str, Tensor], params: Mapping, dtype: np.dtype) -> Iterator[np.ndarray]:
    """Returns each tensor as it is in files, in order. It is gathered when it is asked for."""
    # The three stacks of a layer take turns, and a merged one is computed whenever it is asked for.
    stack = functools.lru_cache(maxsize=3)(functools.partial(_at, params))
    for tensor in tensors.values():
        stretches = []
        for path, shape, _, transposed, part, stacked in tensor.leaves:
            leaf = _at(params, path) if part is None else relayout.entry(stack(path), part)
            value = processes.gathered(leaf, dtype)
            if transposed:
                outputs = int(stacked)
                value = value.reshape(*shape[:outputs], *shape[outputs + 1 :], shape[outputs])
                value = np.moveaxis(value, -1, outputs)
            value = value.reshape(*shape[: tensor.axis], tensor.groups, -1, *shape[tensor.axis + 1 :])
            stretches.append(value)
        whole = stretches[0] if len(stretches) == 1 else np.concatenate(stretches, axis=tensor.axis + 1)
        yield whole.reshape(tensor.shape)


def _ids(eos_ids: tuple[int, ...], bos_id: int | None) -> dict:
    # Written even when empty: for an absent id, readers take Llama's own 1 and 2.
    return {"bos_token_id": bos_id, "eos_token_id": list(eos_ids) if len(eos_ids) > 1 else next(iter(eos_ids), None)}


def _write_json(file: Path, value: Mapping) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n")


@contextlib.contextmanager
def replacing(directory: Path) -> Iterator[Path]:
    """Yields an empty folder, which appears under the name of `directory` at the end, or not at all after an error.

    What a process that was killed meanwhile has left beside it is deleted first. An earlier export that it had renamed gets its
    name back.
    """
    made, old = directory.with_name(f".{directory.name}.part"), _old(directory)
    if (old / directory.name).exists() and not directory.exists():
        os.rename(old / directory.name, directory)
    for left in (made, old):
        shutil.rmtree(left, ignore_errors=True)
    made.mkdir(parents=True)
    try:
        with written.naming(directory):
            yield made
        swap_in(made, directory)
    finally:
        shutil.rmtree(made, ignore_errors=True)


def swap_in(made: Path, directory: Path) -> None:
    """Renames `made` to `directory`. An earlier export is renamed first, and then deleted.

    Raises:
      OSError: a file cannot be renamed. The earlier export stands in its place again.
    """
    if not directory.exists():
        os.rename(made, directory)
        return
    old = _old(directory)
    old.mkdir()
    try:
        os.rename(directory, old / directory.name)
        os.rename(made, directory)
    except OSError:
        if not directory.exists():
            os.rename(old / directory.name, directory)
        old.rmdir()
        raise
    shutil.rmtree(old)


def _old(directory: Path) -> Path:
    return directory.with_name(f".{directory.name}.old")
