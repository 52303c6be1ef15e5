"""A policy learns from preference pairs."""

from __future__ import annotations

from typing import Any

from prefect import State

from tasks.stage import Session, run_stage, stage_task


@stage_task("dpo")
def dpo(session: Session, name: str, key: str, inputs: dict[str, str]) -> State[dict[str, Any]]:
    """Stage `name`; see `run_stage`."""
    return run_stage(session, name, key, inputs)
