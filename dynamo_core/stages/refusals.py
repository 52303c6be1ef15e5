"""What the machine refuses a stage, as errors with an exit code and a remedy."""

from __future__ import annotations

import errno

from safetensors import SafetensorError

from dynamo_core.errors import DataError, DynamoError, ResourceExhausted

MACHINE_ERRORS = (OSError, MemoryError, RuntimeError, SafetensorError)
"""The types that `as_user_error` knows something about."""
_SHORT_WRITES = ("inline_container", "PytorchStreamWriter", "No space left on device")
"""How torch and safetensors say that a file could not be written whole; neither raises an OSError."""


def as_user_error(error: OSError | MemoryError | RuntimeError | SafetensorError) -> DynamoError | None:
    """What to tell the person who started the run; None for a defect, which keeps its traceback."""
    if (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or "not enough memory" in str(error)
    ):
        return ResourceExhausted(
            f"out of memory: {_first_line(error)}", "lower micro_batch_size or sampling.batch_tokens"
        )
    full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    if full or any(sign in str(error) for sign in _SHORT_WRITES):
        return ResourceExhausted(f"the disk is full: {_first_line(error)}", "free space or move the store")
    if isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EROFS):
        return DataError(f"no permission: {error}", "choose a store you may write to")
    return None


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0]
