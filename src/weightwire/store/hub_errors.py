"""What huggingface_hub's errors mean."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from weightwire.errors import ObjectMissing, StoreRefused, StoreUnavailable, WeightwireError
from weightwire.store.source import Source

_PASSING_STATUS = {408, 409, 425, 429}
_MAX_REASON = 200


@contextmanager
def mapped_errors(
    verb: str, bucket: str, name: str, source: Source | None = None
) -> Iterator[None]:
    """Turn the hub client's errors into ours; those of ``source`` stay as they are.

    Raises:
        ObjectMissing: a read of an object that is not there.
        StoreRefused: what a person must change.
        StoreUnavailable: everything else; the write may have happened.
    """
    # The HTTP library under the hub client has changed over its releases; its errors module
    # always has the one in use.
    from huggingface_hub.errors import (
        EntryNotFoundError,
        HTTPError,
    )

    try:
        yield
    except (HTTPError, EntryNotFoundError, OSError, RuntimeError, ValueError) as error:
        if source is not None and error is source.failure:
            raise
        raise _mapped(verb, f"hf://buckets/{bucket}/{name}", error) from error


def _mapped(verb: str, where: str, error: Exception) -> WeightwireError:
    """Our error for one of the hub client's."""
    from huggingface_hub.errors import EntryNotFoundError, LocalTokenNotFoundError

    reason = str(error).partition("\n")[0].partition("?")[0][:_MAX_REASON]
    if verb == "read" and isinstance(error, EntryNotFoundError):
        return ObjectMissing(f"{where}: no such object; it was collected, or never written")
    status = getattr(getattr(error, "response", None), "status_code", 0)
    is_refusal = 400 <= status < 500 and status not in _PASSING_STATUS
    if is_refusal or isinstance(error, (LocalTokenNotFoundError, ValueError)):
        return StoreRefused(
            f"cannot {verb} {where}: {reason}; create the bucket, and log in with `hf auth login`"
        )
    return StoreUnavailable(f"cannot {verb} {where}: {reason}; try again, and check the network")
