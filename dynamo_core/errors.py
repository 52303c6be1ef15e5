"""The errors a user can meet, and the exit code each one leads to.

    DynamoError                 base: one line (what, where, allowed values, remedy)
      RecipeError         (2)   the recipe, an input file or the machine cannot do what is asked
      DataError           (2)   rows that cannot be used
      ResourceExhausted   (3)   out of memory or disk
      NumericalFailure    (4)   a non-finite loss, gradient, reward or weight
      StagePaused        (75)   its time is over; the next run goes on from its checkpoint
      StageCrashed        (1)   a stage process died without saying why
    AlgorithmError              an argument of a pure function is out of range (a ValueError)

Broad handlers are not needed anywhere: what is not in this tree is a defect and keeps its traceback.
"""

from __future__ import annotations


class DynamoError(Exception):
    """A one-line message for the person who started the run.

    Args:
        cause: what is wrong, where, and the offending value.
        remedy: what to do about it; empty when the cause says it all.
        step: the training step at which it happened, where there is one.
    """

    exit_code = 1

    def __init__(self, cause: str, remedy: str = "", step: int | None = None) -> None:
        super().__init__(cause if not remedy else f"{cause} ({remedy})")
        self.cause = cause
        self.remedy = remedy
        self.step = step


class RecipeError(DynamoError):
    """The recipe, a path in it or the machine cannot do what is asked."""

    exit_code = 2


class DataError(DynamoError):
    """Rows that cannot be used, or too many of them."""

    exit_code = 2


class ResourceExhausted(DynamoError):
    """Memory or disk ran out."""

    exit_code = 3


class NumericalFailure(DynamoError):
    """A non-finite number stopped training; nothing of the run's model is saved."""

    exit_code = 4


class StagePaused(DynamoError):
    """A stage saved a checkpoint and stopped by itself; another run continues it."""

    exit_code = 75


class StageCrashed(DynamoError):
    """A stage process ended without a manifest and without an error.json."""


class AlgorithmError(ValueError):
    """An argument of an algorithm is out of range: names the argument, the value and the bound."""
