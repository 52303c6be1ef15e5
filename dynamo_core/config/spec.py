"""spec.json: what a stage process is told. Written by the side that launches it, read by `dynamo_core.stages`."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from dynamo_core.config.base import Frozen, NonNegativeInt, PositiveInt, Resources
from dynamo_core.config.stages import Stage

SPEC_SCHEMA = 1


class StageSpec(Frozen):
    """One stage, resolved, with its inputs as folders."""

    spec_schema: PositiveInt = SPEC_SCHEMA
    recipe: str
    name: str
    key: str
    """The 64 hex digits of the cache key."""
    seed: NonNegativeInt
    stage: Stage
    resources: Resources
    inputs: dict[str, str] = Field(default_factory=dict)
    """Input role -> absolute stage folder of the producer."""
    versions: dict[str, str] = Field(default_factory=dict)
    """Library -> version, of those that change results."""

    def write(self, folder: Path) -> None:
        """Write spec.json into `folder`."""
        (folder / "spec.json").write_text(self.model_dump_json(indent=1) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> StageSpec:
        """Read spec.json of `folder`."""
        return cls.model_validate_json((folder / "spec.json").read_text(encoding="utf-8"))
