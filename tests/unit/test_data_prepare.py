"""The prepare_data stage as a whole: files, counts, errors, and byte-for-byte repetition."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dynamo_core import stages
from dynamo_core.config.base import Resources
from dynamo_core.config.spec import StageSpec
from dynamo_core.config.stages import PrepareDataStage
from dynamo_core.data.rows import SCHEMAS, read_demonstrations, read_pairs, read_prompts
from dynamo_core.errors import DataError
from dynamo_core.stages.manifest import read_manifest
from dynamo_core.types import Message

MESSAGES = Path(__file__).parents[1] / "data" / "messages"
ARITHMETIC = {"type": "arithmetic", "problems": 600}


def write_spec(folder: Path, source: dict[str, Any], seed: int = 0, **fields: Any) -> Path:
    folder.mkdir()
    stage = PrepareDataStage.model_validate({"type": "prepare_data", "source": source, **fields})
    StageSpec(recipe="r", name="data", key="0" * 64, seed=seed, stage=stage, resources=Resources()).write(folder)
    return folder


def prepare(folder: Path, source: dict[str, Any], seed: int = 0, **fields: Any) -> dict[str, float]:
    stages.run(write_spec(folder, source, seed, **fields))
    manifest = read_manifest(folder)
    assert manifest is not None
    return manifest.metrics


def write_rows(path: Path, rows: list[dict[str, Any]]) -> dict[str, Any]:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return {"type": "messages", "path": str(path)}


def task(question: str, answer: str, reply: str | None = None) -> dict[str, Any]:
    turns = [{"role": "user", "content": question}]
    return {"messages": turns + ([{"role": "assistant", "content": reply}] if reply else []), "answer": answer}


def test_arithmetic_from_end_to_end(tmp_path: Path) -> None:
    metrics = prepare(tmp_path / "s", ARITHMETIC, rl_prompts=100)
    data = tmp_path / "s" / "data"
    demonstrations, rl = read_demonstrations(data), read_prompts(data, "rl")
    held_out = read_prompts(data, "validation") + read_prompts(data, "test")
    assert metrics["rows_read"] == metrics["rows_kept"] == 600
    assert metrics["rows_quarantined"] == 0 and metrics["rows_rl"] == len(rl) == 100
    assert len(demonstrations) + len(held_out) == 600
    assert all(row.messages[-1].role == "user" and row.source == "arithmetic" for row in rl + held_out)
    assert all(row.messages[-1].role == "assistant" for row in demonstrations)
    seen = {row.messages[:1] for row in demonstrations} | {row.messages for row in rl}
    assert seen.isdisjoint(row.messages for row in held_out)
    pairs = read_pairs(data)
    assert metrics["rows_preference"] == len(pairs) == len(demonstrations)
    assert {row.messages for row in pairs} == {row.messages[:1] for row in demonstrations}
    assert (tmp_path / "s" / "quarantine.jsonl").read_text() == ""
    line = json.loads((tmp_path / "s" / "metrics.jsonl").read_text())
    assert line["step"] == 1 and line["values"] == metrics


def test_outputs_repeat_byte_for_byte(tmp_path: Path) -> None:
    for name, seed in (("one", 4), ("two", 4), ("other", 5)):
        prepare(tmp_path / name, ARITHMETIC, seed)
    for split in SCHEMAS:
        one, two, other = (
            (tmp_path / name / "data" / f"{split}.parquet").read_bytes() for name in ("one", "two", "other")
        )
        assert one == two != other


def test_bad_rows_are_quarantined_and_counted(tmp_path: Path) -> None:
    rows = [task(f"What is {number} + 1?", str(number + 1), "so") for number in range(40)]
    rows[3]["messages"][0]["role"] = "bot"
    rows[5] = rows[4]
    rows[7] = task("What is 6 + 1?", "8")
    metrics = prepare(tmp_path / "s", write_rows(tmp_path / "rows.jsonl", rows), max_bad_share=0.1)
    lines = [json.loads(line) for line in (tmp_path / "s" / "quarantine.jsonl").read_text().splitlines()]
    assert [(line["row"], line["reason"]) for line in lines] == [
        (3, "unknown_role"),
        (5, "duplicate_exact"),
        (6, "conflicting_gold"),
        (7, "conflicting_gold"),
    ]
    assert set(lines[0]) == {"file", "row", "reason", "value"} and lines[0]["value"] == "bot"
    assert (metrics["rows_read"], metrics["rows_kept"], metrics["rows_quarantined"]) == (40, 36, 4)
    assert metrics["quarantined_conflicting_gold"] == 2 and "quarantined_bad_json" not in metrics


def test_pairs_alone_are_enough(tmp_path: Path) -> None:
    rows = [{**task("1+1?", ""), "chosen": "2", "rejected": "3"}, {**task("1+2?", "3"), "chosen": "3", "rejected": "3"}]
    del rows[0]["answer"]
    source = write_rows(tmp_path / "rows.jsonl", rows)
    metrics = prepare(tmp_path / "s", source, split={"validation": 0.0, "test": 0.0}, max_bad_share=0.5)
    (pair,) = read_pairs(tmp_path / "s" / "data")
    assert (pair.messages, pair.chosen, pair.rejected) == ((Message("user", "1+1?"),), "2", "3")
    assert (metrics["rows_preference"], metrics["rows_sft"], metrics["quarantined_equal_pair"]) == (1, 0, 1)


def test_too_many_bad_rows_stop_the_stage(tmp_path: Path) -> None:
    source = {"type": "messages", "path": str(MESSAGES / "double_encoded.jsonl")}
    with pytest.raises(DataError, match=r"double_encoded\.jsonl: 2 of 2 rows.*not_an_object 2; the first is row 0"):
        prepare(tmp_path / "s", source)
    assert len((tmp_path / "s" / "quarantine.jsonl").read_text().splitlines()) == 2
    assert not (tmp_path / "s" / "data").exists()


def test_copies_do_not_count_as_bad(tmp_path: Path) -> None:
    metrics = prepare(tmp_path / "s", write_rows(tmp_path / "rows.jsonl", [task("1+1?", "2")] * 50), max_bad_share=0.0)
    assert (metrics["rows_rl"], metrics["quarantined_duplicate_exact"]) == (1, 49)


def test_no_training_row_is_an_error(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "rows.jsonl", [task("1+1?", "2", "2")])
    with pytest.raises(DataError, match="no row is left for training"):
        prepare(tmp_path / "s", source, split={"validation": 0.0, "test": 0.999999})


def test_empty_missing_and_damaged_splits_are_named(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "rows.jsonl", [task("1+1?", "2")])
    prepare(tmp_path / "s", source, split={"validation": 0.0, "test": 0.0})
    data = tmp_path / "s" / "data"
    with pytest.raises(DataError, match="'sft' holds no rows"):
        read_demonstrations(data)
    with pytest.raises(DataError, match="'preference' holds no rows"):
        read_pairs(data)
    (data / "rl.parquet").write_bytes(b"PAR1")
    with pytest.raises(DataError, match="'rl' is damaged"):
        read_prompts(data, "rl")
    pq.write_table(pa.table({"a": [1]}), data / "test.parquet")
    with pytest.raises(DataError, match="'test' has other columns"):
        read_prompts(data, "test")
    (data / "validation.parquet").unlink()
    with pytest.raises(DataError, match="'validation' is missing"):
        read_prompts(data, "validation")


def test_the_stage_process_needs_no_torch(tmp_path: Path) -> None:
    write_spec(tmp_path / "s", ARITHMETIC)
    code = (
        "import pathlib, sys; from dynamo_core import stages; stages.run(pathlib.Path(sys.argv[1]));"
        "print(sorted({'torch', 'deepspeed', 'transformers', 'datasets'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "s")], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_missing_file_ends_the_process_with_code_2(tmp_path: Path) -> None:
    write_spec(tmp_path / "s", {"type": "messages", "path": "nowhere.jsonl"})
    command = [sys.executable, "-m", "dynamo_core.stages", str(tmp_path / "s")]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "nowhere.jsonl does not exist (give the path of a messages file, one JSON object a line)"
    ]
    error = json.loads((tmp_path / "s" / "error.json").read_text())
    assert (error["code"], error["cause"]) == (2, "nowhere.jsonl does not exist")
