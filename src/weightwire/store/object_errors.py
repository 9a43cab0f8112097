"""What obstore's errors mean, without the secrets their texts may carry."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from weightwire.errors import ObjectMissing, StoreRefused, StoreUnavailable, WeightwireError
from weightwire.store.source import Source

_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>(\w+)</Code>")
_QUERY = re.compile(r"\?\S*")
_USER = re.compile(r"//[^/\s@]*@")
_NO_BUCKET = ("NoSuchBucket", "ContainerNotFound", "bucket does not exist")
_PASSING_STATUS = {408, 409, 425, 429}
_MAX_REASON = 200


@contextmanager
def mapped_errors(verb: str, store: str, key: str, source: Source | None = None) -> Iterator[None]:
    """Turn obstore's errors into ours; those of ``source`` stay as they are.

    The cause is not chained: its text quotes requests, and a request can carry a signature.

    Raises:
        ObjectMissing: a read of an object that is not there.
        StoreRefused: what a person must change.
        StoreUnavailable: everything else; the write may have happened.
    """
    from obstore.exceptions import BaseError

    try:
        yield
    except (BaseError, OSError, ValueError, RuntimeError) as error:
        if source is not None and error is source.failure:
            raise
        raise _mapped(verb, f"{store}/{key}".rstrip("/"), error) from None


def names_a_conflict(error: Exception) -> bool:
    """Whether S3 met another write of the same name at the same time and did neither."""
    return "ConditionalRequestConflict" in str(error) or "OperationAborted" in str(error)


def names_an_empty_range(error: Exception) -> bool:
    """Whether a read started at or beyond the object's end."""
    return _status(str(error)) == 416


def names_a_missing_bucket(error: Exception) -> bool:
    """Whether it is not the object but its bucket or container that is not there."""
    return any(words in str(error) for words in _NO_BUCKET)


def _mapped(verb: str, where: str, error: Exception) -> WeightwireError:
    """Our error for one of obstore's."""
    text = str(error)
    reason = _reason(text)
    if names_a_missing_bucket(error):
        return StoreRefused(f"cannot {verb} {where}: there is no such bucket; create it first")
    if verb == "read" and isinstance(error, FileNotFoundError):
        return ObjectMissing(f"{where}: no such object; it was collected, or never written")
    if _is_final(error, text):
        return StoreRefused(
            f"cannot {verb} {where}: {reason}; check the bucket, the credentials and their rights"
        )
    return StoreUnavailable(f"cannot {verb} {where}: {reason}; try again, and check the network")


def _is_final(error: Exception, text: str) -> bool:
    """Whether the same request would fail again."""
    from obstore import exceptions

    final = (
        exceptions.PermissionDeniedError,
        exceptions.UnauthenticatedError,
        exceptions.NotSupportedError,
        exceptions.InvalidPathError,
        exceptions.UnknownConfigurationKeyError,
        FileNotFoundError,
        ValueError,
    )
    status = _status(text)
    is_refusal = status is not None and 400 <= status < 500 and status not in _PASSING_STATUS
    return isinstance(error, final) or is_refusal or "HTTP error: builder error" in text


def _status(text: str) -> int | None:
    """The HTTP status an error's text names."""
    found = _STATUS.search(text)
    return int(found[1]) if found else None


def _reason(text: str) -> str:
    """The first line of an error, without query strings and user names, and the store's code."""
    first = text.partition("\n")[0].partition("<?xml")[0].rstrip(": ")
    clean = _USER.sub("//", _QUERY.sub("", first))[:_MAX_REASON]
    code = _CODE.search(text)
    return f"{clean} ({code[1]})" if code else clean
