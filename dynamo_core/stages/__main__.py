"""Entry of a stage process: `python -m dynamo_core.stages <folder>`, one per rank.

Exit code 0: manifest.json is there. 2, 3, 4: error.json says why in one line. 143: SIGTERM. Anything else is a crash
with its traceback in the log. Under a launcher the exit status is only zero or not, so readers use error.json.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import NoReturn

from dynamo_core.errors import DynamoError


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
    """Write error.json unless another rank was first, or the disk is so full that the exit code must do."""
    content = {
        "code": error.exit_code,
        "cause": error.cause,
        "remedy": error.remedy,
        "step": error.step,
        "rank": int(os.environ.get("RANK", "0")),
    }
    path = folder / "error.json"
    try:
        with path.open("x", encoding="utf-8") as file:
            json.dump(content, file)
    except FileExistsError:
        return
    except OSError:
        path.unlink(missing_ok=True)


def main(folder: Path) -> int:
    """Run the stage in `folder`; returns the exit code."""
    signal.signal(signal.SIGTERM, _terminate)
    logging.basicConfig(format="%(levelname)s: %(message)s")  # to the stage's log, like all output
    set_determinism_switches()
    # After the switches: they may load numpy or torch.
    from dynamo_core import stages  # noqa: PLC0415
    from dynamo_core.stages.refusals import MACHINE_ERRORS, as_user_error  # noqa: PLC0415

    try:
        stages.run(folder)
    except DynamoError as error:
        known = error
    except SystemExit as ended:  # SIGTERM; everything has been unwound
        return int(ended.code or 0)
    except MACHINE_ERRORS as error:
        found = as_user_error(error)
        if found is None:
            raise
        known = found
    else:
        return 0
    _write_error(folder, known)
    print(known, file=sys.stderr)  # noqa: T201
    return known.exit_code


def leave(code: int) -> NoReturn:
    """End the process without C++ destructors.

    What still holds a gloo group (DeepSpeed does) is destroyed at exit in any order, and now and then the group's
    threads abort a rank whose work is complete (pytorch/pytorch#190489).
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m dynamo_core.stages FOLDER")
    leave(main(Path(sys.argv[1])))
