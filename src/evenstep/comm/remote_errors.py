"""An error of one rank in words, as the other ranks are told of it and raise it."""

from __future__ import annotations

import json

from evenstep.errors import RemoteRankError, SampleError

__all__ = ["describe_error", "remote_error"]

_ERROR_BYTES = 4096  # of an error message, so that a monstrous one cannot stop the ranks a second time
_TRACEBACKS = ("_RemoteTraceback", "RemoteTraceback")  # of concurrent.futures and multiprocessing


def describe_error(error: BaseException, rank: int) -> bytes:
    """An error as the others will tell it: where it first happened, in its own words."""
    sample = None
    if isinstance(error, SampleError):
        sample = error.sample
        # Another process sends an error without its cause: what stands in its place there is a traceback as text.
        if error.__cause__ is not None and type(error.__cause__).__name__ not in _TRACEBACKS:
            error = error.__cause__
    told = {"rank": rank, "type": type(error).__name__, "message": str(error), "sample": sample}
    if (
        isinstance(error, RemoteRankError)
        and error.error_type
        and (error.rank >= 0 or isinstance(error, SampleError))
    ):
        told = {
            "rank": error.rank if error.rank >= 0 else rank,
            "type": error.error_type,
            "message": error.error_message,
            "sample": error.sample,
        }
    message = str(told["message"])
    while len(text := json.dumps(told).encode()) > _ERROR_BYTES:
        message = message[: len(message) // 2]
        told["message"] = message + " [...]"
    return text


def remote_error(text: bytes, sender: int = -1) -> RemoteRankError:
    """What a rank raises that was told of another's error, in ``text``, by the rank ``sender`` if known."""
    try:
        told = json.loads(text)
        told = {key: told[key] for key in ("rank", "type", "message", "sample")}
    except (ValueError, TypeError, KeyError):
        return RemoteRankError(
            f"{'another rank' if sender < 0 else f'rank {sender}'} failed and could not say why; its own error is in "
            "its output",
            rank=sender,
        )
    where = "" if told["sample"] is None else f" at sample {told['sample']}"
    return RemoteRankError(
        f"rank {told['rank']} failed{where}: {told['type']}: {told['message']} (every rank stops here; the traceback "
        f"is on rank {told['rank']})",
        rank=told["rank"],
        error_type=told["type"],
        error_message=told["message"],
        sample=told["sample"],
    )
