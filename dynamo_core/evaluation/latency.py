"""Speed of a model as one user meets it: one prompt at a time, greedy."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from dynamo_core.rollout.engine import RolloutEngine
from dynamo_core.types import RolloutRequest


@dataclass(frozen=True)
class LatencyReport:
    """Milliseconds from prompt to complete answer."""

    p50_ms: float
    p95_ms: float


def measure(engine: RolloutEngine, requests: Sequence[RolloutRequest]) -> LatencyReport:
    """Answer each request alone; the first one is answered once more beforehand, to warm up."""
    greedy = [replace(request, n=1, sampling=replace(request.sampling, temperature=0.0)) for request in requests]
    engine.generate(greedy[:1])
    seconds = []
    for request in greedy:
        started = time.perf_counter()
        engine.generate([request])
        seconds.append(time.perf_counter() - started)
    p50, p95 = np.quantile(seconds, [0.5, 0.95]) * 1000
    return LatencyReport(float(p50), float(p95))
