"""Why a stage's processes died without a word of their own: the launcher's report and the last lines of the log."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dynamo_core.errors import DynamoError, NumericalFailure, RecipeError, ResourceExhausted, StageCrashed, StagePaused

BY_CODE: Final[dict[int, type[DynamoError]]] = {
    2: RecipeError,
    3: ResourceExhausted,
    4: NumericalFailure,
    75: StagePaused,
}
_RANK_PREFIX: Final = re.compile(r"^\[rank(\d+)\]:\s*")
_EXCEPTION: Final = re.compile(r"^(?:\w+\.)*\w*(?:Error|Exception|Interrupt|Exit|Failure|Iteration)\b")
_CHAINED: Final = ("During handling of the above exception", "The above exception was the direct cause")
_REPORTED_RANK: Final = re.compile(r"^\s*rank\s*:\s*(\d+)")
_REPORTED_CODE: Final = re.compile(r"^\s*exitcode\s*:\s*(-?\d+)")


class StageLost(StageCrashed):
    """A stage process was killed by a signal that we did not send: worth another try."""


@dataclass(frozen=True)
class Death:
    """Of one rank, as the launcher reports it; an exit code below 0 is a signal's number."""

    rank: int | None
    exit_code: int


def explain(name: str, status: int, folder: Path, log: Path, start: int) -> DynamoError:
    """The error for stage `name`, which ended with `status` and left no error.json; its log begins at byte `start`."""
    lines = log.read_bytes()[start:].decode("utf-8", errors="replace").splitlines()
    number = -status if status < 0 else status - 128 if status > 128 else 0
    death = first_death(lines) if not number else Death(None, -number)
    who = f"stage '{name}'" if death is None or death.rank is None else f"stage '{name}': rank {death.rank}"
    if death is not None and -death.exit_code in {known.value for known in signal.Signals}:
        killer = signal.Signals(-death.exit_code)
        hint = "the system may have run out of memory; " if killer == signal.SIGKILL else ""
        return StageLost(f"{who} was killed by {killer.name}{_after(folder)} ({hint}full log: {log})")
    words = last_words(lines, None if death is None else death.rank)
    if status in BY_CODE:  # the disk was too full for error.json
        return BY_CODE[status](f"stage '{name}': {words}")
    return StageCrashed(f"{who} crashed with exit code {status}{_after(folder)}: {words}; full log: {log}")


def first_death(lines: Sequence[str]) -> Death | None:
    """The rank whose end took the others with it; None where no launcher reports one.

    The launcher stops the others with SIGTERM, and those that lose a peer in the middle of a sum end with an error:
    a rank that another signal killed comes before both, else the launcher's own root cause, its last entry.
    """
    found: list[Death] = []
    rank: int | None = None
    for line in lines:
        if match := _REPORTED_RANK.match(line):
            rank = int(match[1])
        elif match := _REPORTED_CODE.match(line):
            found.append(Death(rank, int(match[1])))
    killed = [death for death in found if death.exit_code < 0 and death.exit_code != -signal.SIGTERM]
    return killed[0] if killed else found[-1] if found else None


def last_words(lines: Iterable[str], rank: int | None = None) -> str:
    """The line of a log that says why it ended: the last exception of the first traceback, else the last line.

    Args:
        rank: whose lines to look at, where that rank has left any.
    """
    kept = [line for line in lines if line.strip(" =-*\t")]
    own = [line for line in kept if (match := _RANK_PREFIX.match(line)) and int(match[1]) == rank]
    meaningful = [_RANK_PREFIX.sub("", line).strip() for line in own or kept]
    in_traceback = False
    for line, following in zip(meaningful, [*meaningful[1:], ""], strict=False):
        in_traceback = in_traceback or line.startswith("Traceback (most recent call last)")
        if in_traceback and _EXCEPTION.match(line) and not following.startswith(_CHAINED):
            return line
    return meaningful[-1] if meaningful else "it wrote nothing"


def _after(folder: Path) -> str:
    """The last step that was recorded."""
    try:
        *_, last = (line for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines() if line)
        return f" after step {json.loads(last)['step']}"
    except (OSError, ValueError, KeyError):
        return ""
