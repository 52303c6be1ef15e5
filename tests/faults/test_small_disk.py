"""A disk that runs full in the middle of a save: a real one, a few megabytes in memory."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.faults import harness


@pytest.fixture
def small_disk(tmp_path: Path):
    """A folder that holds 6 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(folder)], check=True)
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_keeps_the_last_checkpoint_and_the_stage_goes_on_with_room(
    inputs, undisturbed, tmp_path, small_disk
):
    folder = harness.prepare(harness.recipe(), "teacher", inputs, tmp_path)
    (small_disk / "teacher").mkdir()
    shutil.copytree(folder, small_disk / "teacher", dirs_exist_ok=True)
    shutil.rmtree(folder)
    folder.symlink_to(small_disk / "teacher")
    room = os.statvfs(small_disk)
    ballast = small_disk / "ballast"
    ballast.write_bytes(b"\0" * (room.f_bavail * room.f_frsize - 2_600_000))  # two checkpoints and a half
    status, output = harness.run(folder)
    assert status == 3, output
    error = json.loads((folder / "error.json").read_text())
    assert (error["code"], error["remedy"]) == (3, "free space or move the store")
    assert "disk is full" in error["cause"]
    whole = sorted(path.name for path in (folder / "checkpoints").glob("step-*"))
    assert whole
    ballast.unlink()
    (folder / "error.json").unlink()
    status, output = harness.run(folder)
    assert status == 0, output
    harness.assert_equal(harness.outcome(folder), undisturbed("teacher"))
