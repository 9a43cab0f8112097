"""What a reader demands of every record: the signature of a key it has pinned.

A signature covers a record's kind, run, version and everything else in it, so a signed record is
good in one place only. Whoever holds a pinned key can publish to the run; use one key per run, or
a record of the other run is only told apart by the run's name.
"""

from __future__ import annotations

import re

from weightwire.errors import BadSignature, StopError, UnsignedRecord
from weightwire.store.records import Verify
from weightwire.trust.keys import PublicKey

_SIGNATURE = re.compile(r"[0-9a-f]{128}")
"""One spelling only: a second one would give the same record another SHA-256."""


def require(*keys: PublicKey) -> Verify:
    """A check that lets pass what one of these keys signed; several while keys are rotated.

    Raises:
        StopError: no key was given: that would refuse everything, or seem to check something.
    """
    if not keys:
        raise StopError("no public key to check signatures with: give at least one")

    def verify(message: bytes, signature: str, where: str) -> None:
        if not signature:
            raise UnsignedRecord(
                f"{where}: not signed, and this reader accepts only {_named(keys)}; start the"
                " publisher with its key, or find out who wrote this"
            )
        if not _is_signed(message, signature, keys):
            raise BadSignature(
                f"{where}: not signed by {_named(keys)}, or changed since; if the publisher has a"
                " new key, pin its public key too, else find out who wrote this"
            )

    return verify


def _is_signed(message: bytes, signature: str, keys: tuple[PublicKey, ...]) -> bool:
    if not _SIGNATURE.fullmatch(signature):
        return False
    raw = bytes.fromhex(signature)
    return any(key.has_signed(message, raw) for key in keys)


def _named(keys: tuple[PublicKey, ...]) -> str:
    return "key " + " or ".join(key.fingerprint for key in keys)
