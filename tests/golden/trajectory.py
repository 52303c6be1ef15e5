"""Ten steps of the method on scripted rollouts, in float64: what a change without numeric effect must not move.

    python -m tests.golden.trajectory --record     # after a change that should alter numbers; say why in CHANGELOG.md

Answers are scripted so that every step has groups with mixed rewards; their log-probs, entropies and brackets come
from one score pass with the present weights.
"""

from __future__ import annotations

import hashlib
import json
import platform
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from dynamo_core.config.base import Resources
from dynamo_core.config.reinforce import ReinforceStage
from dynamo_core.config.spec import StageSpec
from dynamo_core.data.batching import TokenRow, pad_rows
from dynamo_core.data.templates import encode_prompt
from dynamo_core.metrics import MetricsWriter
from dynamo_core.rollout.collector import PromptTask
from dynamo_core.rollout.engine import ScriptedEngine
from dynamo_core.stages import reinforce, reinforce_parts
from dynamo_core.stages.context import StageContext, TableWriter
from dynamo_core.training import distributed
from dynamo_core.training.policy import TokenScorer
from dynamo_core.types import Rollout, RolloutRequest
from tests.builders import prompt_row, smoke_recipe, tiny_model, tiny_tokenizer

RECORD = Path(__file__).parent / "trajectory.json"
STEPS = 5
"""Of a variant; the recorded trajectory has RECORDED."""
RECORDED = 10
PROMPTS = {f"{a}+{b}=?": str(a + b) for a in range(1, 7) for b in (3, 8)}


class ScoredScript:
    """A scripted engine whose rollouts are scored with the policy, in its own precision."""

    def __init__(self, scorer: TokenScorer, script: ScriptedEngine) -> None:
        self._scorer = scorer
        self._script = script
        self.weight_version = 0

    @torch.no_grad()
    def generate(self, requests: Sequence[RolloutRequest]) -> list[Rollout]:
        return [self._scored(rollout) for rollout in self._script.generate(requests)]

    def _scored(self, rollout: Rollout) -> Rollout:
        start = len(rollout.prompt_token_ids)
        tokens = rollout.prompt_token_ids + rollout.response_token_ids
        batch = pad_rows([TokenRow(tokens, (False,) * start + (True,) * (len(tokens) - start))])
        scores = self._scorer(batch.token_ids_BL, batch.target_mask_BL)
        log_probs, entropies, brackets = (values_BL[0, start:].numpy().copy() for values_BL in scores)
        (segment,) = rollout.segments
        return replace(
            rollout,
            segments=(replace(segment, log_probs=log_probs, entropies=entropies, brackets=brackets),),
            weight_version=self.weight_version,
        )


class Recorder(MetricsWriter):
    """Keeps every step's values."""

    def __init__(self) -> None:
        super().__init__(None)
        self.steps: list[dict[str, float]] = []

    def write(self, step, values, timings):
        super().write(step, values, timings)
        self.steps.append(dict(self.last))


def stage(**changes) -> ReinforceStage:
    """The exact preset on 6 prompts x 6 rollouts, both modulation factors on."""
    recipe = smoke_recipe(
        [
            f"stages.reinforced.steps={STEPS}",
            "stages.reinforced.prompts_per_step=6",
            "stages.reinforced.rollouts_per_prompt=6",
            "stages.reinforced.micro_batch_size=5",
            "stages.reinforced.modulation.stabilisation=true",
            "stages.reinforced.checkpoints={every: 1000, minutes: 1e6}",
            *(f"stages.reinforced.{key.replace('__', '.')}={value}" for key, value in changes.items()),
        ]
    )
    found = recipe.stages["reinforced"]
    assert isinstance(found, ReinforceStage)
    return found


def script(tokenizer) -> ScriptedEngine:
    """Right, wrong and rambling answers, chosen by a digest of (prompt, step, rollout)."""

    def answer(request: RolloutRequest, rollout: int) -> list[int]:
        digest = hashlib.sha256(f"{request.prompt_id}/{request.step}/{rollout}".encode()).digest()
        hardness = hashlib.sha256(request.prompt_id.encode()).digest()[0]
        right = digest[0] > hardness
        said = PROMPTS[request.prompt_id] if right else str(digest[1] % 30 + 40)
        text = f"{request.prompt_id[:-1]}{said}\n#### {said}" if digest[2] % 3 else f"#### {said}"
        return [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]

    return ScriptedEngine(answer)


def run(**changes) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    """(values of each step, final parameters)."""
    tokenizer = tiny_tokenizer()
    config = stage(**changes)
    tasks = {
        text: PromptTask(prompt_row(text, gold), encode_prompt(tokenizer, prompt_row(text).messages))
        for text, gold in PROMPTS.items()
    }
    spec = StageSpec(recipe="golden", name="golden", key="0" * 64, seed=11, stage=config, resources=Resources())
    recorder = Recorder()
    folder = Path("/nonexistent")
    context = StageContext(folder, spec, recorder, TableWriter(folder, enabled=False), rank=0, world_size=1)
    context.tables.flush = lambda step: None  # type: ignore[method-assign]
    with distributed.start(Resources(), always_group=True) as ranks:
        model = tiny_model(tokenizer, seed=1, dtype=torch.float64)
        rollouts = ScoredScript(TokenScorer(model), script(tokenizer))
        parts = reinforce_parts.build(
            context, config, ranks, model=model, tokenizer=tokenizer, tasks=tasks, rollout_engine=rollouts
        )
        reinforce.loop(context, config, parts)
    return recorder.steps, {name: parameter.detach() for name, parameter in model.named_parameters()}


def fingerprint() -> dict[str, str]:
    """What must agree for a bitwise comparison."""
    cpu = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        platform.processor(),
    )
    return {"cpu": cpu, "capability": torch.backends.cpu.get_cpu_capability(), "torch": torch.__version__}


def summary() -> dict[str, object]:
    """The trajectory in comparable form; floats as hex, so that equality is bitwise."""
    steps, parameters = run(steps=RECORDED)
    return {
        "fingerprint": fingerprint(),
        "steps": [{name: float(value).hex() for name, value in values.items()} for values in steps],
        "parameters": {name: float(tensor.sum()).hex() for name, tensor in parameters.items()},
        "digest": hashlib.sha256(
            b"".join(np.ascontiguousarray(t.numpy()).tobytes() for t in parameters.values())
        ).hexdigest(),
    }


if __name__ == "__main__":
    if sys.argv[1:] != ["--record"]:
        sys.exit("usage: python -m tests.golden.trajectory --record")
    RECORD.write_text(json.dumps(summary(), indent=1) + "\n")
