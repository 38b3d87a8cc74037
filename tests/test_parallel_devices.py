"""The table of devices: names that runtimes report, figures beside jax's own and the makers', and kinds that nobody knows."""

from __future__ import annotations

import math

import pytest
from jax._src import tpu_info

from jaxrl_post.engine import step_cost
from jaxrl_post.parallel import devices

# device_kind: what the data sheet says of dense bfloat16 TFLOP/s (float32's where there are no such units), GB/s and GB.
SHEETS = {
    "Tesla T4": ("t4", 8.1, 300, 16),
    "Tesla V100-SXM2-16GB": ("v100", 15.7, 900, 16),
    "Tesla V100-SXM2-32GB": ("v100-32gb", 15.7, 900, 32),
    "NVIDIA A10": ("a10", 125, 600, 24),
    "NVIDIA A10G": ("a10g", 70, 600, 24),
    "NVIDIA L4": ("l4", 121, 300, 24),
    "NVIDIA L40S": ("l40s", 362, 864, 48),
    "NVIDIA A100-SXM4-40GB": ("a100-40gb", 312, 1555, 40),
    "NVIDIA A100-PCIE-40GB": ("a100-40gb", 312, 1555, 40),
    "NVIDIA A100-SXM4-80GB": ("a100", 312, 2039, 80),
    "NVIDIA A100 80GB PCIe": ("a100", 312, 2039, 80),
    "NVIDIA GeForce RTX 3090": ("rtx3090", 71, 936, 24),
    "NVIDIA GeForce RTX 4090": ("rtx4090", 165.2, 1008, 24),
    "NVIDIA GeForce RTX 5090": ("rtx5090", 209.5, 1792, 32),
    "NVIDIA RTX 6000 Ada Generation": ("rtx6000-ada", 364, 960, 48),
    "NVIDIA RTX PRO 6000 Blackwell Server Edition": ("rtxpro6000", 504, 1597, 96),
    "NVIDIA H100 PCIe": ("h100-pcie", 756, 2000, 80),
    "NVIDIA H100 80GB HBM3": ("h100", 989, 3350, 80),
    "NVIDIA H100 NVL": ("h100-nvl", 835, 3900, 94),
    "NVIDIA H800": ("h800", 990, 3350, 80),
    "NVIDIA H200": ("h200", 989, 4800, 141),
    "NVIDIA GH200 480GB": ("gh200", 989, 4000, 96),
    "NVIDIA B200": ("b200", 2250, 7700, 180),
    "NVIDIA GB200": ("gb200", 2500, 8000, 186),
    "NVIDIA B300 SXM6 AC": ("b300", 2250, 7700, 270),
    "NVIDIA GB300": ("gb300", 2500, 8000, 279),
    "AMD Instinct MI250X / MI250": ("mi250x", 383 / 2, 3277 / 2, 64),  # a device is half of a card
    "AMD Instinct MI300X": ("mi300x", 1307.4, 5300, 192),
    "AMD Instinct MI325X": ("mi325x", 1307.4, 6000, 256),
    "AMD Instinct MI355X": ("mi355x", 2500, 8000, 288),
}
TPUS = {
    **{"TPU v4": "v4", "TPU v4 lite": "v4i", "TPU v5 lite": "v5e", "TPU v5e": "v5e", "TPU v5": "v5p", "TPU v5p": "v5p"},
    **{"TPU v6 lite": "v6e", "TPU v6e": "v6e", "TPU7": "tpu7x", "TPU7x": "tpu7x", "TPU8i": "tpu8i", "TPU8t": "tpu8t"},
}
SPLIT = ("tpu7x", "tpu8i")  # jax shows each core as a device


@pytest.mark.parametrize("kind", SHEETS)
def test_gpus_are_as_their_data_sheets_say(kind):
    name, tflops, bandwidth, memory = SHEETS[kind]
    found = devices.of(kind)
    assert (found.name, found.platform, found.known) == (name, "gpu", True)
    assert found.flops == pytest.approx(tflops * 1e12, rel=0.002)
    assert found.bandwidth == pytest.approx(bandwidth * 1e9, rel=0.002)
    assert 0.88 * memory * 1e9 <= found.memory <= memory * 1.075e9  # what the driver shows, less a GiB


@pytest.mark.parametrize("kind", TPUS)
def test_tpus_are_as_jax_says(kind):
    """jax's figures are of a core. Those of Google's pages differ from them by up to a ninth (v5p's bandwidth)."""
    version = tpu_info.chip_version_from_device_kind(kind)
    cores = version.num_physical_tensor_cores_per_chip
    theirs, found = tpu_info._get_tpu_info_impl(version, cores), devices.of(kind)
    times = 1 if found.name in SPLIT else cores
    assert (found.name, found.platform, found.known) == (TPUS[kind], "tpu", True)
    assert found.flops == pytest.approx(theirs.bf16_ops_per_second * times, rel=0.005)
    assert found.bandwidth == pytest.approx(theirs.mem_bw_bytes_per_second * times, rel=0.13)
    assert 0.94 <= found.memory / (theirs.hbm_capacity_bytes * times) <= 1


def test_every_kind_has_a_cost_and_is_found_by_its_own_name():
    for name, one in devices.DEVICES.items():
        assert devices.of(one.reported) == one == devices.of(name), name
        table = step_cost.analytic(one.reported, 500_000_000, 2, (64, 256))
        assert table.source == f"analytic:{name}" and all(0 < s < math.inf for s in table.seconds)


@pytest.mark.parametrize(
    "kind, platform, like",
    [
        ("TPU v3", "tpu", "v5e"),
        ("TPU v19 lite", "tpu", "v5e"),
        ("Trillium", "tpu", "v5e"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "gpu", "l4"),
        ("NVIDIA GB10", "gpu", "l4"),
        ("Radeon RX 7900 XTX", "gpu", "l4"),
        ("METAL", "METAL", "l4"),
        ("", "gpu", "l4"),
    ],
)
def test_an_unknown_kind_has_the_figures_of_a_slow_one_and_its_own_memory(kind, platform, like):
    found, model = devices.of(kind, platform, 5_000_000_000), devices.DEVICES[like]
    assert (found.flops, found.bandwidth, found.memory) == (model.flops, model.bandwidth, 5_000_000_000)
    assert devices.of(kind, platform).memory <= model.memory
    said = devices.estimated(found, kind)
    assert f"{kind} is no known kind" in said and f"take the figures of {like}" in said and "engine.cost_table" in said
    assert not devices.estimated(model, model.reported)


def test_a_part_of_a_gpu_is_a_part():
    whole, part = devices.of("NVIDIA A100-SXM4-40GB"), devices.of("NVIDIA A100-SXM4-40GB MIG 3g.20gb")
    assert part.flops == pytest.approx(whole.flops * 3 / 7) and part.bandwidth == pytest.approx(whole.bandwidth / 2)
    assert part.memory == 19 << 30 and part.known


def test_bfloat16_and_kernels_follow_the_generation():
    has = {kind: (one.bfloat16, one.flash) for kind in SHEETS if (one := devices.of(kind))}
    assert {kind for kind, found in has.items() if not found[0]} == {kind for kind in has if kind.startswith("Tesla")}
    assert {kind for kind, found in has.items() if not found[1]} == {
        kind for kind in has if kind.startswith(("Tesla", "AMD"))
    }
    assert [devices.of(kind).flash for kind in TPUS] == [False] * 2 + [True] * 10
