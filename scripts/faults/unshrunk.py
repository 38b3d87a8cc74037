"""A plugin of pytest: hypothesis stops at the first example that fails, as only that it fails is asked for."""

from __future__ import annotations

import hypothesis
from hypothesis import Phase


def pytest_collection() -> None:
    """Behind the conftest, before any test is imported: a test takes the profile that it is decorated under."""
    hypothesis.settings.register_profile(
        "unshrunk", hypothesis.settings(), phases=(Phase.explicit, Phase.generate), database=None
    )
    hypothesis.settings.load_profile("unshrunk")
