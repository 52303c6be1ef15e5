"""How training stages go on after an interruption: checkpoints, and metrics and tables that go back to them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dynamo_core.config.stage_base import Checkpoints
from dynamo_core.stages.context import StageContext
from dynamo_core.training.checkpoint import Checkpointer, Savable
from dynamo_core.training.distributed import Ranks


def checkpointer(
    context: StageContext, config: Checkpoints, ranks: Ranks, parts: Mapping[str, Savable], *, steps: int
) -> Checkpointer:
    """Of the stage of `context`; `parts` and `steps` as in Checkpointer."""
    return Checkpointer(context.folder, context.spec.key, config, ranks, parts, steps=steps)


def resume(context: StageContext, checkpoints: Checkpointer) -> tuple[int, dict[str, Any]]:
    """(last finished step, what the loop had remembered) of the newest checkpoint; (0, {}) where there is none.

    Metrics and tables go back to that step.
    """
    found = checkpoints.resume()
    if found is None:
        context.tables.cut(-1)
        return 0, {}
    context.tables.cut(found.step)
    context.metrics.resume(found.state["metrics"])
    return found.step, found.state


def state(context: StageContext, step: int, **parts: Any) -> dict[str, Any]:
    """`parts` and the position of metrics, for a checkpoint; tables are written up to `step` first."""
    context.tables.flush(step)
    return {"metrics": context.metrics.state_dict(), **parts}
