"""Child processes that never outlive their parent, and stopping a whole tree of them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import psutil

_PR_SET_PDEATHSIG: Final = 1
_DEATH_SECONDS: Final = 5.0
"""How long the kernel may take to end what was killed."""
_LIBC: Final = ctypes.CDLL(None)


def _die_with_parent() -> None:
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


class ProcessTree:
    """A child in a session of its own, and everything that it starts.

    The session keeps the terminal's Ctrl-C away from it: its parent decides when it ends. The kernel sends it SIGTERM
    when the thread that made it dies, so kill -9 of the parent leaves nothing behind.
    """

    def __init__(self, command: Sequence[str], env: Mapping[str, str], log: Path) -> None:
        """Start `command`, its output appended to `log`."""
        with log.open("ab") as file:
            self._child = subprocess.Popen(
                command,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_die_with_parent,  # noqa: PLW1509 (one system call, resolved before the fork)
            )
        self.pid = self._child.pid
        self._members: dict[int, psutil.Process] = {}

    def poll(self) -> int | None:
        """The child's exit status, negative for a signal; None while it runs."""
        return self._child.poll()

    def note_members(self) -> None:
        """Remember who belongs to the tree now: orphans move to init and could not be found later."""
        with contextlib.suppress(psutil.NoSuchProcess):
            root = psutil.Process(self.pid)
            self._members.update({process.pid: process for process in [root, *root.children(recursive=True)]})

    def stop(self, grace: float) -> None:
        """End the whole tree: SIGTERM to the child, SIGKILL to whoever is left after `grace` seconds.

        Ranks of a launcher live in sessions of their own, so ending the process group is not enough. A second Ctrl-C
        ends the waiting, not the killing.
        """
        self.note_members()
        try:
            if self.poll() is None:
                os.killpg(self.pid, signal.SIGTERM)
            else:  # its launcher died before its ranks
                for member in self._members.values():
                    with contextlib.suppress(psutil.NoSuchProcess):
                        member.terminate()
            end = time.monotonic() + grace
            while time.monotonic() < end:
                self.poll()
                self.note_members()
                if not any(_alive(member) for member in self._members.values()):
                    return
                time.sleep(0.1)
        finally:
            for member in self._members.values():
                with contextlib.suppress(psutil.NoSuchProcess):
                    member.kill()  # psutil compares start times: never another process with a reused id
            self._child.wait()
            psutil.wait_procs(self._members.values(), timeout=_DEATH_SECONDS)


def _alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
