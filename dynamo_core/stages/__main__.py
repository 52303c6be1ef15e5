"""Entry of a stage process: `python -m dynamo_core.stages <folder>`, one per rank.

Exit code 0: manifest.json is there. 2, 3, 4: error.json says why in one line. 143: SIGTERM. Anything else is a crash
with its traceback in the log. Under a launcher the exit status is only zero or not, so readers use error.json.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import signal
import sys
from pathlib import Path
from types import FrameType

from dynamo_core.errors import DataError, DynamoError, ResourceExhausted


def set_determinism_switches() -> None:
    """Environment that must be there before numpy and torch load; explicit settings win."""
    threads = os.environ.get("OMP_NUM_THREADS", "1")
    for name, value in {
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "OPENBLAS_NUM_THREADS": threads,
        "OMP_DYNAMIC": "FALSE",
        "MKL_DYNAMIC": "FALSE",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "TOKENIZERS_PARALLELISM": "false",
    }.items():
        os.environ.setdefault(name, value)


def _terminate(signum: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + signum)


def _write_error(folder: Path, error: DynamoError) -> None:
    """Write error.json unless another rank was first."""
    content = {
        "code": error.exit_code,
        "cause": error.cause,
        "remedy": error.remedy,
        "step": error.step,
        "rank": int(os.environ.get("RANK", "0")),
    }
    try:
        with (folder / "error.json").open("x", encoding="utf-8") as file:
            json.dump(content, file)
    except FileExistsError:
        return


def _as_user_error(error: OSError | MemoryError | RuntimeError) -> DynamoError | None:
    """What the machine refused, as an error with an exit code; None for anything else."""
    if isinstance(error, MemoryError):
        return ResourceExhausted(f"out of memory: {error}", "lower micro_batch_size or sampling.batch_tokens")
    if isinstance(error, OSError):
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return ResourceExhausted(f"the disk is full: {error}", "free space or move the store")
        if error.errno in (errno.EACCES, errno.EROFS):
            return DataError(f"no permission: {error}", "choose a store you may write to")
        return None
    if type(error).__name__ == "OutOfMemoryError" or "not enough memory" in str(error):
        cause = str(error).splitlines()[0]
        return ResourceExhausted(f"out of memory: {cause}", "lower micro_batch_size or sampling.batch_tokens")
    return None


def main(folder: Path) -> int:
    """Run the stage in `folder`; returns the exit code."""
    signal.signal(signal.SIGTERM, _terminate)
    logging.basicConfig(format="%(levelname)s: %(message)s")  # to the stage's log, like all output
    set_determinism_switches()
    from dynamo_core import stages  # noqa: PLC0415  (after the switches: it may load torch)

    try:
        stages.run(folder)
    except DynamoError as error:
        known = error
    except (OSError, MemoryError, RuntimeError) as error:
        found = _as_user_error(error)
        if found is None:
            raise
        known = found
    else:
        return 0
    _write_error(folder, known)
    print(known, file=sys.stderr)  # noqa: T201
    return known.exit_code


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m dynamo_core.stages FOLDER")
    sys.exit(main(Path(sys.argv[1])))
