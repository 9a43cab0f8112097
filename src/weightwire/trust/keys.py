"""Who may publish: an Ed25519 key pair, its private half in a file, its public half on one line.

The private half is stored as unencrypted PKCS8 PEM. It is what OpenSSL and key vaults make and take,
and secret scanners know its first line, so a key that slips into a commit or a log is caught. The
public half is one short line that can be pasted into a configuration: ``ww-ed25519:<base64>``.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import logging
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from weightwire.errors import ExtraMissing, OutputExists, StopError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import (
        Ed25519PrivateKey,
        Ed25519PublicKey,
    )

log = logging.getLogger("weightwire.trust")

PUBLIC_PREFIX = "ww-ed25519:"
_PRIVATE_MARK = b"PRIVATE KEY-----"
_MAX_KEY_FILE_BYTES = 1 << 16
_FIELD = 2**255 - 19
_ORDER_8 = 0x05FC536D880238B13933C6D305ACDFD5F098EFF289F4C345B027B2C28F95E826
_SMALL_ORDER = frozenset({0, 1, _FIELD - 1, _FIELD, _FIELD + 1, _ORDER_8, _FIELD - _ORDER_8})
"""Points, without their sign bit, under which anyone can make signatures: all zeros is one."""


@dataclass(frozen=True)
class PublicKey:
    """What a reader pins: it tells a record of the run's publisher from any other."""

    raw: bytes

    @classmethod
    def parse(cls, text: str | Path) -> PublicKey:
        """A public key from its line, or from a file that holds that line.

        Raises:
            StopError: neither, or a key under which anyone could sign.
        """
        if isinstance(text, str) and text.strip().startswith(PUBLIC_PREFIX):
            return cls(_decode(text.strip()))
        path = Path(text)
        found = _read_key_file(path)
        if _PRIVATE_MARK in found:
            raise StopError(
                f"{path}: a private key; readers must get the public one only:"
                f" weightwire keygen --show {path}"
            )
        return cls(_decode(found.decode("ascii", "replace").strip(), f"{path}: "))

    def __str__(self) -> str:
        """The line that ``parse`` reads."""
        return PUBLIC_PREFIX + base64.b64encode(self.raw).decode()

    @property
    def fingerprint(self) -> str:
        """Sixteen hex digits to tell keys apart by, in messages and by eye."""
        return hashlib.sha256(self.raw).hexdigest()[:16]

    def has_signed(self, message: bytes, signature: bytes) -> bool:
        """Whether the private half made this signature of this message.

        Raises:
            ExtraMissing: the library for signatures is not installed.
        """
        _need_cryptography()
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

        try:
            Ed25519PublicKey.from_public_bytes(self.raw).verify(signature, message)
        except (InvalidSignature, ValueError):
            return False
        return True


@dataclass(frozen=True)
class SigningKey:
    """What a publisher signs with; whoever has it can publish."""

    _private: Ed25519PrivateKey

    @classmethod
    def generate(cls) -> SigningKey:
        """A new key, from the system's source of randomness.

        Raises:
            ExtraMissing: the library for signatures is not installed.
        """
        _need_cryptography()
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def load(cls, path: str | Path) -> SigningKey:
        """The key that ``save`` wrote; warns if others on the machine may read it.

        Raises:
            StopError: no file, or one that holds no such key.
            ExtraMissing: the library for signatures is not installed.
        """
        path = Path(path)
        raw = _read_key_file(path)
        key = cls(_parse_private(raw, path))
        if path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            log.warning("%s: others may read this private key: chmod 600 %s", path, path)
        return key

    def save(self, path: str | Path) -> None:
        """Write the key to a new file that only its owner may read.

        Raises:
            OutputExists: the path is taken; a key that is in use must not be lost.
            OSError: the system refused; nothing is left behind.
        """
        path = Path(path)
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            raise OutputExists(
                f"{path} exists already, and keys are never overwritten: choose another name"
            ) from None
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(self._pem())
                file.flush()
                os.fsync(file.fileno())
        except BaseException:
            path.unlink(missing_ok=True)
            raise

    def sign(self, message: bytes) -> str:
        """The signature of a message, in hex: a ``Sign`` of ``weightwire.store.records``."""
        return self._private.sign(message).hex()

    @property
    def public(self) -> PublicKey:
        """The half to give to readers."""
        return PublicKey(_raw_public(self._private.public_key()))

    def __repr__(self) -> str:
        """Which key it is, and nothing of its secret."""
        return f"SigningKey({self.public.fingerprint})"

    def _pem(self) -> bytes:
        from cryptography.hazmat.primitives import serialization

        return self._private.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )


def _need_cryptography() -> None:
    """Say what to install before an import fails."""
    try:
        import cryptography.exceptions  # noqa: F401
    except ImportError:
        raise ExtraMissing("signatures need cryptography: pip install cryptography") from None


def _decode(line: str, where: str = "") -> bytes:
    try:
        raw = base64.b64decode(line.removeprefix(PUBLIC_PREFIX).encode("ascii"), validate=True)
    except (binascii.Error, UnicodeEncodeError):
        raw = b""
    # The same key must not have two spellings: base64 lets the last bits be anything.
    if str(PublicKey(raw)) != line or len(raw) != 32:
        raise StopError(
            f"{where}{line!r:.80} is no public key: it looks like {PUBLIC_PREFIX}<44 characters>,"
            " as weightwire keygen prints it"
        )
    if int.from_bytes(raw, "little") & (2**255 - 1) in _SMALL_ORDER:
        raise StopError(f"{where}{line} is a placeholder, not a key: anyone could sign under it")
    return raw


def _read_key_file(path: Path) -> bytes:
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise StopError(f"{path}: not a file that can hold a key")
        with path.open("rb") as file:
            return file.read(_MAX_KEY_FILE_BYTES)
    except OSError as error:
        raise StopError(
            f"{str(path)!r:.120}: no key there: {error.strerror}; make one with weightwire keygen"
        ) from error


def _parse_private(raw: bytes, path: Path) -> Ed25519PrivateKey:
    _need_cryptography()
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    if raw.startswith(PUBLIC_PREFIX.encode()):
        raise StopError(f"{path}: a public key; signing needs the private one")
    try:
        key = load_pem_private_key(raw, password=None)
    except TypeError:
        raise StopError(f"{path}: the key is encrypted; give one that is not") from None
    except (ValueError, UnsupportedAlgorithm):
        raise StopError(f"{path}: no private key that weightwire keygen wrote") from None
    if not isinstance(key, Ed25519PrivateKey):
        raise StopError(f"{path}: a private key of another kind; Weightwire signs with Ed25519")
    return key


def _raw_public(key: Ed25519PublicKey) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    return key.public_bytes(Encoding.Raw, PublicFormat.Raw)
