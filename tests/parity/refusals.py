"""How a pure function refuses an argument: one line with argument, value and bound."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from dynamo_core.errors import AlgorithmError


def named(cases: Sequence[tuple[str, Callable[[], Any], str]]) -> list[Any]:
    """Parameters of (name, call, expected message)."""
    return [pytest.param(call, message, id=name) for name, call, message in cases]


def refused(call: Callable[[], Any], message: str) -> None:
    """`call` raises an AlgorithmError whose one line matches `message`."""
    with pytest.raises(AlgorithmError, match=message) as caught:
        call()
    assert isinstance(caught.value, ValueError)
    assert "\n" not in str(caught.value)
    assert "must be" in str(caught.value)
