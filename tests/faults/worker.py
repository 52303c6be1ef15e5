"""A stage process for fault tests: keeps its checkpoints at the end, so that their last states can be compared.

python -m tests.faults.worker FOLDER [--kill-in-save N]   (or under torchrun)

--kill-in-save N: the process kills itself with SIGKILL in the middle of its N-th save.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from dynamo_core.stages.__main__ import leave, main, set_determinism_switches

set_determinism_switches()


def keep_checkpoints() -> None:
    from dynamo_core import stages

    stages.remove_checkpoints = lambda folder: None


def kill_in_save(number: int) -> None:
    from dynamo_core.training.checkpoint import Checkpointer

    publish, calls = Checkpointer._publish, []

    def dying(self, temporary, final, step):
        calls.append(step)
        if len(calls) == number:
            next(temporary.rglob("*.pt")).write_bytes(b"half")
            os.kill(os.getpid(), signal.SIGKILL)
        publish(self, temporary, final, step)

    Checkpointer._publish = dying  # type: ignore[method-assign]


if __name__ == "__main__":
    if "--kill-in-save" in sys.argv:
        kill_in_save(int(sys.argv[sys.argv.index("--kill-in-save") + 1]))
    keep_checkpoints()
    leave(main(Path(sys.argv[1])))
