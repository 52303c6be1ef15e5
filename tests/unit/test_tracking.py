"""What is sent to MLflow and how, without a server: names, parameters, and delivery while the server is away."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from mlflow.exceptions import MlflowException

from dynamo_core.config.load import load_recipe
from dynamo_core.metrics import MetricsWriter
from tasks import outbox, tracking
from tasks.figures import allocation_histogram, evaluation_bars
from tasks.follow import StageFollower
from tasks.outbox import Tracker, TrackingTarget, status_of
from tasks.results import results_table
from tasks.store import Store
from tasks.tracking import IMAGES_A_STAGE, flatten, image_steps, metric_key

DATA_ONLY = Path(__file__).parents[1] / "data" / "data_only.yaml"
LEGAL = re.compile(r"^[\w./: -]+$")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("reward/mean", "reward/mean"),
        ("student/sampled_pass@1", "student/sampled_pass_at_1"),
        ("a[0]", "a_x5b_0_x5d_"),
        ("/lead", "lead"),
    ],
)
def test_metric_keys_are_legal(name: str, expected: str) -> None:
    assert metric_key(name) == expected
    assert LEGAL.match(metric_key(name))


def test_different_names_stay_different() -> None:
    names = ["acc@1", "acc_1", "acc[1]", "acc(1)", "acc%1", "acc 1", "acc.1"]
    assert len({metric_key(name) for name in names}) == len(names)


def test_flatten_reaches_every_leaf() -> None:
    content = {"a": {"b": 1, "c": [1, 2]}, "d": None, "e": True, "f": "text", "g": {}}
    assert dict(flatten(content)) == {"a.b": "1", "a.c": "[1, 2]", "d": "null", "e": "true", "f": "text", "g": "{}"}


@pytest.mark.parametrize("steps", [1, 3, 50, 51, 99, 1000])
def test_images_are_few_and_spread(steps: int) -> None:
    found = image_steps(steps)
    assert len(found) == min(steps, IMAGES_A_STAGE)
    assert {1, steps} <= found
    assert max(found) == steps


def test_histogram_is_an_image() -> None:
    image = allocation_histogram(3, [2, 2, 8, 4])
    assert image.dtype == np.uint8
    assert image.shape[2] == 4
    assert len(np.unique(image)) > 2


def cell(value: float, low: float | None = None, high: float | None = None) -> dict[str, float | None]:
    return {"value": value, "low": low, "high": high}


RESULTS = {
    "prompts": 10,
    "samples": 4,
    "models": [
        {
            "name": name,
            "parameters": 100,
            "metrics": {
                "sampled_pass@1": cell(0.5, 0.4, 0.6),
                "greedy_pass@1": cell(0.5, 0.4, 0.6),
                "pass@1": cell(0.5),
                "pass@4": cell(0.75),
                "latency_p50_ms": cell(12.0),
            },
            "bands": {"2": {"sampled_pass@1": cell(0.7, 0.6, 0.8)}},
        }
        for name in ("teacher", "student")
    ],
}


def test_evaluation_becomes_a_table_and_a_figure() -> None:
    table = results_table(RESULTS)
    assert table["model"] == ["teacher", "teacher", "student", "student"]
    assert table["difficulty"] == ["all", "2", "all", "2"]
    assert table["sampled_pass@1"] == [0.5, 0.7, 0.5, 0.7]
    assert table["sampled_pass@1 low"] == [0.4, 0.6, 0.4, 0.6]
    assert table["latency_p50_ms"] == [12.0, None, 12.0, None]
    labels = [text.get_text() for text in evaluation_bars(RESULTS).axes[0].get_legend().get_texts()]
    assert labels == ["sampled_pass@1", "greedy_pass@1", "pass@4"]


def test_a_follower_yields_each_complete_line_once(tmp_path: Path) -> None:
    follower = StageFollower(tmp_path)
    assert follower.lines() == []
    with (tmp_path / "metrics.jsonl").open("w") as file:
        for step in (1, 2):
            file.write(f'{{"step": {step}, "attempt": 1, "values": {{"a": {step}}}, "timings": {{}}}}\n')
        file.write('{"step": 3, "att')
        file.flush()
        assert [line.step for line in follower.lines()] == [1, 2]
        assert follower.lines() == []
        file.write('empt": 1, "values": {}, "timings": {"s": 1.5}}\n')
        file.flush()
        assert [(line.step, line.timings) for line in follower.lines()] == [(3, {"s": 1.5})]
    (tmp_path / "tables").mkdir()
    for name in ("allocations-000002.parquet", "allocations-000001.parquet", "samples-000001.parquet"):
        (tmp_path / "tables" / name).touch()
    assert [part.name for part in follower.table_parts("allocations")] == [
        "allocations-000001.parquet",
        "allocations-000002.parquet",
    ]
    assert follower.table_parts("allocations") == []


def test_a_follower_of_a_resumed_stage_sees_every_step_once(tmp_path: Path) -> None:
    """Three steps were there, the checkpoint knows two: the file begins again under another inode."""
    first = MetricsWriter(tmp_path / "metrics.jsonl")
    for step in (1, 2):
        first.write(step, {"a": step}, {})
    state = first.state_dict()
    first.write(3, {"a": 3}, {})
    first.close()
    follower = StageFollower(tmp_path)
    assert [line.step for line in follower.lines()] == [1, 2, 3]
    second = MetricsWriter(tmp_path / "metrics.jsonl")
    second.resume(state)
    assert second.last == {"a": 2.0}
    for step in (3, 4, 5):
        second.write(step, {"a": step}, {})
    assert [line.step for line in follower.lines()] == [4, 5]
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["attempt"]) for line in lines] == [(1, 1), (2, 1), (3, 2), (4, 2), (5, 2)]


def test_status_says_how_a_run_ended() -> None:
    assert [status_of(kind) for kind in (None, ValueError, KeyboardInterrupt, SystemExit)] == [
        "FINISHED",
        "FAILED",
        "KILLED",
        "KILLED",
    ]


class FakeRecorder:
    """Takes records as MLflow's recorder does; `failures` are raised first, one a call."""

    def __init__(self, failures: list[Exception]) -> None:
        self.failures = failures
        self.taken: list[str] = []

    def take(self, word: str) -> None:
        if self.failures:
            raise self.failures.pop(0)
        self.taken.append(word)

    def start_run(self, digest: str) -> None:
        self.take("start")

    def finish_run(self, status: str) -> None:
        self.take(status)


@pytest.fixture
def make_tracker(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[[list[Exception]], tuple[Tracker, FakeRecorder]]:
    def make(failures: list[Exception]) -> tuple[Tracker, FakeRecorder]:
        recorder = FakeRecorder(failures)
        monkeypatch.setattr(tracking, "Recorder", lambda *arguments: recorder)
        monkeypatch.setattr(outbox, "RETRY_SECONDS", 0.01)
        tracker = Tracker(Store(tmp_path), load_recipe(DATA_ONLY), "run", TrackingTarget("nowhere", None))
        return tracker, recorder

    return make


def test_records_arrive_once_and_in_order_after_an_outage(make_tracker, capsys) -> None:
    tracker, recorder = make_tracker([ConnectionError("refused")] * 3)
    with tracker:
        for word in ("a", "b", "c"):
            tracker.post(lambda recorder, word=word: recorder.take(word))
    assert recorder.taken == ["start", "a", "b", "c", "FINISHED"]
    assert capsys.readouterr().err.count("tracking is away") == 1


def test_what_mlflow_refuses_does_not_hold_up_the_rest(make_tracker, capsys) -> None:
    tracker, recorder = make_tracker([MlflowException("no such thing", error_code=1000)])
    with tracker:
        tracker.post(lambda recorder: recorder.take("a"))
    assert recorder.taken == ["a", "FINISHED"]
    assert "tracking refused a record: no such thing" in capsys.readouterr().err


def test_a_server_that_stays_away_ends_with_a_warning(make_tracker, monkeypatch, capsys) -> None:
    monkeypatch.setattr(outbox, "CLOSE_SECONDS_WHEN_AWAY", 0.5)
    tracker, recorder = make_tracker([ConnectionError("refused")] * 10_000)
    started = time.monotonic()
    with pytest.raises(KeyError), tracker:
        raise KeyError("the run's own end")
    assert time.monotonic() - started < 5
    assert recorder.taken == []
    assert "tracking is incomplete" in capsys.readouterr().err


@pytest.mark.parametrize(("kind", "expected"), [(ValueError, "FAILED"), (KeyboardInterrupt, "KILLED")])
def test_the_run_gets_its_status_whatever_ends_it(make_tracker, kind, expected) -> None:
    tracker, recorder = make_tracker([])
    with pytest.raises(kind), tracker:
        raise kind
    assert recorder.taken == ["start", expected]


def test_a_tracking_address_that_nobody_understands_is_one_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = Store(tmp_path)
    store.prepare()
    with Tracker(store, load_recipe(DATA_ONLY), "run", TrackingTarget("foo://bar", artifacts=None)):
        pass
    assert "tracking is off, nothing can be recorded at foo://bar" in capsys.readouterr().err
