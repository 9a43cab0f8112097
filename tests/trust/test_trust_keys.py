"""Keys: what is written can be read, by its owner only; everything else is refused by name."""

from __future__ import annotations

import base64
import builtins
import logging
import os
import stat
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from weightwire.errors import ExtraMissing, OutputExists, StopError
from weightwire.trust.keys import PublicKey, SigningKey


def line(raw: bytes) -> str:
    return "ww-ed25519:" + base64.b64encode(raw).decode()


def test_a_saved_key_signs_as_the_one_that_was_made(tmp_path: Path) -> None:
    key = SigningKey.generate()
    key.save(tmp_path / "run.key")
    loaded = SigningKey.load(tmp_path / "run.key")
    assert loaded.public == key.public
    assert loaded.sign(b"message") == key.sign(b"message")
    assert key.public.has_signed(b"message", bytes.fromhex(loaded.sign(b"message")))
    assert not key.public.has_signed(b"massage", bytes.fromhex(loaded.sign(b"message")))


def test_a_saved_key_is_for_its_owner_only_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        SigningKey.generate().save(tmp_path / "run.key")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "run.key").stat().st_mode) == 0o600


def test_a_key_file_is_what_openssl_and_secret_scanners_know(tmp_path: Path) -> None:
    SigningKey.generate().save(tmp_path / "run.key")
    text = (tmp_path / "run.key").read_text()
    assert text.startswith("-----BEGIN PRIVATE KEY-----\n")


def test_a_key_is_never_overwritten_not_even_through_a_link(tmp_path: Path) -> None:
    key = SigningKey.generate()
    key.save(tmp_path / "run.key")
    kept = (tmp_path / "run.key").read_bytes()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for name in ("run.key", "link"):
        with pytest.raises(OutputExists, match="never overwritten"):
            SigningKey.generate().save(tmp_path / name)
    assert (tmp_path / "run.key").read_bytes() == kept
    assert not (tmp_path / "elsewhere").exists()


def test_a_failed_save_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        SigningKey.generate().save(tmp_path / "run.key")
    assert list(tmp_path.iterdir()) == []


def test_a_key_that_others_may_read_is_loaded_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "run.key"
    SigningKey.generate().save(path)
    with caplog.at_level(logging.WARNING):
        SigningKey.load(path)
        assert caplog.records == []
        path.chmod(0o640)
        SigningKey.load(path)
    assert "chmod 600" in caplog.text


def test_files_that_hold_no_signing_key_are_refused_by_what_they_are(tmp_path: Path) -> None:
    key = Ed25519PrivateKey.generate()
    pem, pkcs8 = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    no_password = serialization.NoEncryption()
    encrypted = key.private_bytes(pem, pkcs8, serialization.BestAvailableEncryption(b"secret"))
    other = rsa.generate_private_key(65537, 2048).private_bytes(pem, pkcs8, no_password)
    wrong = {
        "encrypted": encrypted,
        "another kind": other,
        "no private key": b"hello",
        "a public key": line(bytes(range(32))).encode(),
    }
    for message, raw in wrong.items():
        path = tmp_path / "some.key"
        path.write_bytes(raw)
        with pytest.raises(StopError, match=message):
            SigningKey.load(path)


def test_a_path_without_a_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(StopError, match="No such file"):
        SigningKey.load(tmp_path / "run.key")
    with pytest.raises(StopError, match="not a file"):
        SigningKey.load(tmp_path)
    with pytest.raises(StopError, match="not a file"):
        PublicKey.parse(tmp_path / "pipe")


def test_a_public_key_is_one_line_from_text_or_file(tmp_path: Path) -> None:
    public = SigningKey.generate().public
    (tmp_path / "run.pub").write_text(f"{public}\n")
    assert PublicKey.parse(str(public)) == public
    assert PublicKey.parse(f"  {public}\n") == public
    assert PublicKey.parse(tmp_path / "run.pub") == public
    assert PublicKey.parse(str(tmp_path / "run.pub")) == public
    assert "\n" not in str(public)


def test_a_fingerprint_tells_keys_apart() -> None:
    keys = [SigningKey.generate().public for _ in range(5)]
    assert len({key.fingerprint for key in keys}) == 5
    assert PublicKey(keys[0].raw).fingerprint == keys[0].fingerprint


@pytest.mark.parametrize(
    "text",
    [
        "ww-ed25519:",
        "ww-ed25519:????",
        line(bytes(range(31))),
        line(bytes(range(33))),
        line(bytes(range(32))) + "A",
        line(bytes(range(32)))[:-2] + "9=",
        "ww-ed25519:ü" + "A" * 42 + "=",
        line(bytes(range(32))) + "\n" + line(bytes(range(32))),
    ],
)
def test_a_line_that_is_no_key_is_refused(text: str) -> None:
    with pytest.raises(StopError, match="is no public key"):
        PublicKey.parse(text)


@pytest.mark.parametrize("last_byte", [0x00, 0x80])
@pytest.mark.parametrize("first_byte", [0, 1])
def test_a_placeholder_under_which_anyone_can_sign_is_refused(
    first_byte: int, last_byte: int
) -> None:
    raw = bytes([first_byte]) + bytes(30) + bytes([last_byte])
    with pytest.raises(StopError, match="placeholder"):
        PublicKey.parse(line(raw))


def test_such_a_placeholder_would_indeed_accept_a_forged_signature() -> None:
    identity = bytes([1]) + bytes(31)
    assert PublicKey(identity).has_signed(b"anything", identity + bytes(32))


def test_a_private_key_given_to_a_reader_is_refused(tmp_path: Path) -> None:
    SigningKey.generate().save(tmp_path / "run.key")
    with pytest.raises(StopError, match="weightwire keygen --show"):
        PublicKey.parse(tmp_path / "run.key")


def test_a_signing_key_prints_nothing_of_its_secret(tmp_path: Path) -> None:
    key = SigningKey.generate()
    assert repr(key) == f"SigningKey({key.public.fingerprint})"


def test_without_cryptography_the_message_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = builtins.__import__

    def without(name: str, *arguments: Any) -> Any:
        if name.startswith("cryptography"):
            raise ImportError(name)
        return real(name, *arguments)

    public = SigningKey.generate().public
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ExtraMissing, match="pip install cryptography"):
        SigningKey.generate()
    with pytest.raises(ExtraMissing, match="pip install cryptography"):
        public.has_signed(b"", bytes(64))
