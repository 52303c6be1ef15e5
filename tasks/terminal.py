"""The consoles that people read: results and progress on stdout, warnings and errors on stderr."""

from __future__ import annotations

import sys
from typing import Final

from rich.console import Console

_PLAIN_WIDTH: Final = 200
"""Of output that goes to a file or pipe: wide enough that no table is cut."""


def _console(*, stderr: bool) -> Console:
    stream = sys.stderr if stderr else sys.stdout
    return Console(stderr=stderr, highlight=False, soft_wrap=True, width=None if stream.isatty() else _PLAIN_WIDTH)


out: Final = _console(stderr=False)
err: Final = _console(stderr=True)


def say(text: str) -> None:
    """One line for the person who watches."""
    out.print(text, markup=False)


def warn(text: str) -> None:
    """One line about something that does not stop the run."""
    err.print(f"warning: {text}", markup=False)


def complain(text: str) -> None:
    """The one line that says why the run ended."""
    err.print(f"error: {text}", markup=False)
