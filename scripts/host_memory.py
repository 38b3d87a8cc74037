"""python scripts/host_memory.py FOLDER TREE_MIB PHASE... : what one process of a job holds while weights come and go.

The phases are `draw`, `export`, `load`, `save` and `restore`. A tree of weights is drawn or loaded. It is exported as a
Hugging Face directory, saved as a checkpoint, or restored onto another mesh.

Each process writes FOLDER/PHASE.N.json: its highest resident bytes during the phase, beyond those before there was a
tree. Also its share of the tree, the bytes of the largest leaf, and the bytes that it read.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))


def shape_of(tree_mib: int) -> Any:
    """Returns a decoder of about so many MiB in float32. Its largest leaf is a 32nd of them."""
    from jaxrl_post.models.model_config import ModelConfig

    embed = 2048 if tree_mib >= 4096 else 1024 if tree_mib >= 1024 else 512
    heads, ffw, vocab = embed // 128, 4 * embed, tree_mib * (1 << 18) // 32 // embed
    layer = embed * 128 * heads * 3 + 3 * embed * ffw
    layers = (tree_mib * (1 << 18) - 2 * vocab * embed) // layer
    return ModelConfig(
        vocab_size=vocab,
        embed=embed,
        layers=layers,
        heads=heads,
        kv_heads=heads // 2,
        head_dim=128,
        ffw=ffw,
        max_length=64,
        norm_eps=1e-6,
        qk_norm=False,
    )


class Worker:
    """One process. `params` is the tree that the phases hand on."""

    def __init__(self, folder: Path, tree_mib: int):
        import jax

        from jaxrl_post.models import decoder
        from jaxrl_post.parallel import mesh as meshes

        self.folder, self.model = folder, shape_of(tree_mib)
        self.axes = decoder.axes(self.model)
        count = jax.device_count()
        self.mesh = meshes.make_mesh(1, count, 1)
        self.other = meshes.make_mesh(1, count // 2, 2) if count > 1 else self.mesh
        self.params: Any = None
        jax.block_until_ready(meshes.put({"one": meshes.np.zeros(8)}, meshes.replicated(self.mesh)))

    def homes(self, mesh: Any) -> Any:
        from jaxrl_post.parallel import mesh as meshes

        return meshes.param_shardings(mesh, self.axes, "learner")

    def draw(self) -> None:
        from jaxrl_post.models import decoder

        self.params = decoder.placed(self.model, 0, self.homes(self.mesh))

    def export(self) -> None:
        from jaxrl_post.models import hf

        hf.save(self.folder / "policy", self.model, self.params, dtype="float32", max_file_bytes=1 << 30)

    def load(self) -> None:
        from jaxrl_post.models import hf

        _, self.params = hf.load(self.folder / "policy", shardings=self.homes(self.mesh))

    def saves(self) -> Any:
        from jaxrl_post.runs.checkpoint.store import Checkpoints

        return Checkpoints(self.folder / "checkpoints", keep_last=2, say=print)

    def save(self) -> None:
        self.saves().save(1, self.params, {"marks": {}}, {"processes": 1})

    def restore(self) -> None:
        import jax

        from jaxrl_post.models import decoder

        like = jax.tree.map(
            lambda leaf, home: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=home),
            decoder.abstract(self.model),
            self.homes(self.other),
        )
        self.params = self.saves().newest().arrays(like)

    def sums(self) -> list[int]:
        """Returns a sum of the bits of each leaf, the same on every mesh."""
        import jax
        import jax.numpy as jnp

        @jax.jit
        def total(tree):
            return [jnp.sum(jax.lax.bitcast_convert_type(leaf, jnp.uint32), dtype=jnp.uint32) for leaf in tree]

        return [int(one) for one in total(jax.tree.leaves(self.params))]


def resident(name: str = "VmRSS") -> int:
    """Returns the resident bytes of this process, or with VmHWM the highest since `forget`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1]) * 1024


def forget() -> None:
    """Begins a new highest value of resident bytes."""
    Path("/proc/self/clear_refs").write_text("5")


def read_bytes() -> int:
    """Returns the bytes that this process has read so far, from files and elsewhere."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("rchar")).split()[1])


def run(folder: Path, tree_mib: int, phases: list[str]) -> None:
    import jax

    from jaxrl_post.launch import own_process
    from jaxrl_post.parallel import exchange, processes

    own_process.return_large_blocks()
    processes.start(os.environ)
    worker = Worker(folder, tree_mib)
    before = resident()
    for phase in phases:
        exchange.meet()  # all begin together
        own_process.give_back()
        forget()
        begun, read = time.perf_counter(), read_bytes()
        getattr(worker, phase)()
        jax.block_until_ready(worker.params)
        found = {
            "peak": resident("VmHWM") - before,
            "before": before,
            "seconds": time.perf_counter() - begun,
            "read": read_bytes() - read,
        }
        leaves = jax.tree.leaves(worker.params)
        found["share"] = sum(shard.data.nbytes for leaf in leaves for shard in leaf.addressable_shards)
        found |= {"leaf": max(leaf.nbytes for leaf in leaves), "tree": sum(leaf.nbytes for leaf in leaves)}
        found["sums"] = worker.sums()
        (folder / f"{phase}.{jax.process_index()}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    run(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
