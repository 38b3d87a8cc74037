"""What a call refuses: a ValueError of one sentence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


def refused(sentence: str, call: Callable, *given: Any, **options: Any) -> str:
    """Calls with what is given. Returns the error, which is one line and holds `sentence`, a regular expression."""
    with pytest.raises(ValueError, match=sentence) as caught:
        call(*given, **options)
    assert type(caught.value) is ValueError and "\n" not in str(caught.value)
    return str(caught.value)
