"""What a cache key depends on, what counts as a hit, and the lock that dies with its holder."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from dynamo_core.config.load import load_recipe
from dynamo_core.config.recipe import Recipe
from dynamo_core.errors import RecipeError
from dynamo_core.stages.manifest import write_manifest
from tasks import cache
from tasks.cache import Hit, Miss, StageReference, locked, look_up, read_reference, stage_key, write_reference
from tasks.code import closure, code_digest
from tasks.store import Store

SMOKE = Path(__file__).parents[2] / "configs" / "smoke.yaml"
KEY = "ab" * 32


def recipe(*overrides: str) -> Recipe:
    return load_recipe(SMOKE, list(overrides))


def key(loaded: Recipe, name: str, digest: str = "0" * 64) -> str:
    return stage_key(loaded, name, dict.fromkeys(loaded.inputs(name), digest))


@pytest.mark.parametrize(
    ("stage", "override", "same"),
    [
        ("teacher", "stages.teacher.resources.timeout_minutes=5", True),
        ("teacher", "stages.teacher.checkpoints.every=7", True),
        ("teacher", "stages.teacher.checkpoints.keep_best={metric: train/loss, mode: min}", False),
        ("teacher", "description=other words", True),
        ("teacher", "stages.student.steps=31", True),
        ("teacher", "stages.teacher.optimizer.lr=1e-3", False),
        ("teacher", "seed=4", False),
        ("teacher", "resources.threads=2", False),
        ("data", "resources.threads=2", True),
        ("data", "stages.data.source.problems=401", False),
        ("reinforced", "stages.reinforced.allocation.low=0.5", False),
        ("reinforced", "stages.reinforced.lora={rank: 4, alpha: 8}", False),
        ("evaluation", "stages.evaluation.models_from=[student, teacher]", False),
    ],
)
def test_only_what_can_change_the_result_changes_the_key(stage: str, override: str, same: bool) -> None:
    assert (key(recipe(), stage) == key(recipe(override), stage)) is same


def test_inputs_enter_by_content_and_role(tmp_path: Path) -> None:
    assert key(recipe(), "teacher") != key(recipe(), "teacher", "1" * 64)
    renamed = tmp_path / "renamed.yaml"
    renamed.write_text(SMOKE.read_text().replace("teacher:", "first_model:"))
    other = load_recipe(renamed)
    assert key(other, "first_model") == key(recipe(), "teacher")
    assert key(other, "student") == key(recipe(), "student")
    assert key(other, "evaluation") != key(recipe(), "evaluation"), "its models' names are in the results"


def test_files_from_outside_enter_by_content(tmp_path: Path) -> None:
    first, second = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    for path in (first, second):
        path.write_text("{}\n")
    source = "stages.data.source={{type: messages, path: {}}}"
    before = key(recipe(source.format(first)), "data")
    assert key(recipe(source.format(second)), "data") == before, "another path, equal content"
    first.write_text('{"messages": []}\n')
    assert key(recipe(source.format(first)), "data") != before, "equal path, other content"
    first.unlink()
    with pytest.raises(RecipeError, match="cannot read"):
        key(recipe(source.format(first)), "data")


def test_pretrained_folders_enter_by_content(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    model = "stages.teacher.model={{type: pretrained, path: {}}}"
    before = key(recipe(model.format(tmp_path / "a")), "teacher")
    assert key(recipe(model.format(tmp_path / "b")), "teacher") == before
    (tmp_path / "a" / "model.safetensors").write_text("weights")
    assert key(recipe(model.format(tmp_path / "a")), "teacher") != before


def test_library_versions_enter(monkeypatch: pytest.MonkeyPatch) -> None:
    before = key(recipe(), "teacher")
    monkeypatch.setattr(cache, "library_versions", lambda: {"torch": "9.9"})
    assert key(recipe(), "teacher") != before


ONE = '''"""One."""
import pack.direct
from ..relative import x

def f():
    """F."""
    from pack import inner  # late
    return inner
'''
DIGEST = """
import sys
from pathlib import Path
from tasks.code import code_digest
print(code_digest("pack.stages.one", Path(sys.argv[1])))
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A package whose module `stages.one` imports in every way there is."""
    files = {
        "pack/__init__.py": "",
        "pack/stages/__init__.py": '"""Stages."""\n',
        "pack/stages/one.py": ONE,
        "pack/stages/two.py": "y = 1\n",
        "pack/direct.py": "import json\nfrom pack.deep.leaf import a\n",
        "pack/deep/__init__.py": "",
        "pack/deep/leaf.py": "a = 1\n",
        "pack/relative.py": "x = 1\n",
        "pack/inner.py": "z = 1\n",
        "pack/unused.py": "u = 1\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def changed(package: Path, name: str, text: str) -> bool:
    """Whether the digest of pack.stages.one changes with the text of file `name`."""

    def digest() -> str:
        command = [sys.executable, "-c", DIGEST, str(package)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    before = digest()
    (package / name).write_text(text)
    return digest() != before


def test_the_closure_holds_every_static_import(package: Path) -> None:
    assert closure("pack.stages.one", package) == {
        "pack",
        "pack.stages",
        "pack.stages.one",
        "pack.direct",
        "pack.deep",
        "pack.deep.leaf",
        "pack.relative",
        "pack.inner",
    }


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("pack/deep/leaf.py", "a = 2\n", True),
        ("pack/inner.py", "z = 2\n", True),
        ("pack/stages/__init__.py", "flag = 1\n", True),
        ("pack/deep/leaf.py", '"""What a is."""\na = 1  # one\n"""One."""\n\n', False),
        ("pack/unused.py", "u = 2\n", False),
        ("pack/stages/two.py", "y = 2\n", False),
    ],
)
def test_code_and_not_its_comments_enter_the_digest(package: Path, name: str, text: str, expected: bool) -> None:
    assert changed(package, name, text) is expected


def test_real_stages_leave_each_other_alone() -> None:
    assert "dynamo_core.stages.reinforce" not in closure("dynamo_core.stages.sft")
    assert "dynamo_core.training.deepspeed.engine" in closure("dynamo_core.stages.sft")
    assert not any(name.startswith("dynamo_core.training") for name in closure("dynamo_core.stages.prepare_data"))
    assert code_digest("dynamo_core.stages.sft") != code_digest("dynamo_core.stages.distill")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    made = Store(tmp_path / "store")
    made.prepare()
    return made


def finished(store: Store, name: str) -> Path:
    folder = store.stage_folder(name, KEY)
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "weights").write_text("12345")
    write_manifest(folder, KEY, {"loss": 1.0}, {})
    return folder


def reason(store: Store) -> str:
    found = look_up(store, "sft", KEY)
    assert isinstance(found, Miss)
    return found.reason


def test_hits_are_verified(store: Store) -> None:
    assert reason(store) == "never run"
    folder = finished(store, "sft")
    found = look_up(store, "sft", KEY)
    assert isinstance(found, Hit)
    assert (found.folder, found.manifest.metrics) == (folder, {"loss": 1.0})
    (folder / "model" / "weights").write_text("1234")
    assert reason(store) == "damaged: model/weights has 4 bytes instead of 5"
    (folder / "model" / "weights").unlink()
    assert reason(store) == "damaged: model/weights is missing"
    (folder / "manifest.json").write_text("{")
    assert reason(store) == "damaged: manifest.json is unreadable"
    (folder / "manifest.json").unlink()
    assert reason(store) == "did not finish"


def test_a_result_counts_under_any_stage_name(store: Store) -> None:
    folder = finished(store, "teacher")
    found = look_up(store, "sft", KEY)
    assert isinstance(found, Hit)
    assert found.folder == folder


def test_equal_beginnings_of_keys_are_not_enough(store: Store) -> None:
    finished(store, "sft")
    assert isinstance(look_up(store, "sft", KEY[:12] + "0" * 52), Miss)


def test_references_outlive_the_folder(store: Store) -> None:
    reference = StageReference(
        name="sft", key=KEY, folder="/gone", payload_digest="d", metrics={"loss": 1.0}, mlflow_run_id=None
    )
    write_reference(store, reference)
    assert read_reference(store, KEY) == reference
    assert reason(store) == "damaged: its folder is gone"


HOLD = """
import sys, time
from pathlib import Path
from tasks.cache import locked
with locked(Path(sys.argv[1]), on_wait=lambda: None):
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_lock_waits_and_dies_with_its_holder(tmp_path: Path) -> None:
    path = tmp_path / "key.lock"
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(path)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    waited: list[float] = []

    def on_wait() -> None:
        waited.append(time.monotonic())
        holder.kill()  # SIGKILL: no handler of its runs

    with locked(path, on_wait):
        assert len(waited) == 1
        assert time.monotonic() - waited[0] < 5
    holder.wait()


def test_an_unwritable_store_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RecipeError, match="cannot write to the store"):
        Store(tmp_path / "file").prepare()
