"""Checks a JobSet manifest before anything is applied: against its schema, and the keys that a schema leaves open.

Source of schema/jobset-v1alpha2.json: the CRD of kubernetes-sigs/jobset, which holds the whole Job and Pod (Apache-2.0,
schema/LICENSE). It refuses unknown fields, without descriptions and with an open metadata.
"""

from __future__ import annotations

import functools
import importlib.resources
import json
from collections.abc import Iterator, Mapping
from typing import Any

import jsonschema
import yaml

FILE = "schema/jobset-v1alpha2.json"
API = {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet"}
# Maps with free keys, by the name of the map: a key that is not here would be ignored by the cluster without a word.
KNOWN = {
    "metadata": ("name", "namespace", "labels", "annotations"),
    "labels": ("kueue.x-k8s.io/queue-name",),
    "annotations": (
        "alpha.jobset.sigs.k8s.io/exclusive-topology",
        "networking.gke.io/default-interface",
        "networking.gke.io/interfaces",
        "devices.gke.io/container.tcpxo-daemon",
    ),
    "nodeSelector": (
        "cloud.google.com/gke-accelerator",
        "cloud.google.com/gke-spot",
        "cloud.google.com/gke-tpu-accelerator",
        "cloud.google.com/gke-tpu-topology",
    ),
    "limits": ("google.com/tpu", "nvidia.com/gpu"),
}


def text(manifest: Mapping[str, Any]) -> str:
    """Returns the manifest as YAML, checked.

    Raises:
      ValueError: as in `check`.
    """
    check(manifest)
    return yaml.safe_dump(manifest, sort_keys=False, width=120)


def check(manifest: Mapping[str, Any]) -> None:
    """Refuses a field that the schema does not have, a value of another type, and a key that no cluster reads.

    Raises:
      ValueError: one sentence with the path of the field.
    """
    errors = sorted(_validator().iter_errors(manifest), key=lambda error: len(error.absolute_path))
    if errors:
        place = ".".join(map(str, errors[0].absolute_path)) or "the manifest"
        raise ValueError(f"JobSet: {place}: {errors[0].message[:300]}")
    lacking = [f"{name}: {value}" for name, value in API.items() if manifest.get(name) != value]
    lacking += [name for name in ("metadata", "spec") if name not in manifest]
    if lacking:
        raise ValueError(f"JobSet: the manifest must have {lacking[0]}")
    for place, name, key in _open(manifest, ""):
        if key not in KNOWN[name]:
            raise ValueError(f"JobSet: {place}.{name}: {key!r} is unknown; known are {', '.join(KNOWN[name])}")


def _open(value: Any, place: str) -> Iterator[tuple[str, str, str]]:
    """Yields (path, name of the map, key) of every key in a map whose keys the schema leaves open."""
    if isinstance(value, list):
        for at, one in enumerate(value):
            yield from _open(one, f"{place}.{at}")
    elif isinstance(value, Mapping):
        for name, one in value.items():
            if name in KNOWN and isinstance(one, Mapping):
                yield from ((place, name, key) for key in one)
            yield from _open(one, f"{place}.{name}")


@functools.cache
def _validator() -> jsonschema.Draft7Validator:
    source = importlib.resources.files("jaxrl_post.launch.jobs").joinpath(FILE)
    return jsonschema.Draft7Validator(json.loads(source.read_text(encoding="utf-8")))
