"""From what a user writes to a store, and what happens when that cannot work."""

from __future__ import annotations

import logging
import socket
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from weightwire.errors import ExtraMissing, ObjectMissing, StoreRefused, StoreUnavailable
from weightwire.store import open as opening
from weightwire.store.contract import ObjectStore
from weightwire.store.folder import FolderStore
from weightwire.store.hub import HubStore
from weightwire.store.memory import MemoryStore
from weightwire.store.objects import ObstoreStore
from weightwire.store.open import open_store
from weightwire.testing.seaweed import BUCKET, S3Server

SECRET = "hunter2"


def test_a_store_passes_through() -> None:
    store = MemoryStore()
    assert open_store(store) is store


def test_paths_and_file_urls_are_the_same_folder(tmp_path: Path) -> None:
    place = tmp_path / "a store"
    open_store(place).put("x", b"1")
    for url in (str(place), f"file://{place}", f"file://localhost{place}".replace(" ", "%20")):
        store = open_store(url)
        assert isinstance(store, FolderStore)
        assert store.read("x") == b"1"


def test_a_relative_folder_stays_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    store = open_store("runs/7")
    monkeypatch.chdir("/")
    store.put("x", b"1")
    assert (tmp_path / "runs" / "7" / "x").read_bytes() == b"1"


def test_memory_is_shared_by_name() -> None:
    name = f"memory://{uuid.uuid4().hex}"
    open_store(name).put("x", b"1")
    assert open_store(f"{name}/").read("x") == b"1"
    for other in ("memory://", "memory://other-name"):
        with pytest.raises(ObjectMissing):
            open_store(other).read("x")


@pytest.mark.parametrize("url", ["s3://bucket/run", "gs://bucket/run", "az://container/run"])
def test_clouds_are_opened_without_asking_them(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    assert isinstance(open_store(url), ObstoreStore)


def test_hub_urls_name_owner_bucket_and_prefix() -> None:
    for url in ("hf://buckets/owner/name", "hf://buckets/owner/name/runs/7"):
        store = open_store(url)
        assert isinstance(store, HubStore)
        assert url in repr(store)
    with pytest.raises(StoreRefused, match="OWNER/NAME"):
        open_store("hf://owner/name")


@pytest.mark.parametrize("url", ["ftp://host/x", "http://host/x", "redis://x"])
def test_unknown_schemes_are_refused_with_what_there_is(url: str) -> None:
    with pytest.raises(StoreRefused, match=r"memory://, s3://"):
        open_store(url)


@pytest.mark.parametrize(
    "url",
    [
        f"s3://key:{SECRET}@bucket/run",
        f"az://container/run?sig={SECRET}",
        f"gs://bucket/run#{SECRET}",
        f"ftp://me:{SECRET}@host/x?token={SECRET}",
        f"file://me:{SECRET}@host/x",
        f"hf://me:{SECRET}@buckets/x",
        "s3:///run",
    ],
)
def test_urls_with_secrets_are_refused_without_repeating_them(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG), pytest.raises(StoreRefused) as caught:
        open_store(url)
    assert SECRET not in str(caught.value) + caplog.text


def test_options_that_are_unknown_are_refused() -> None:
    with pytest.raises(StoreRefused, match="s3://bucket/run"):
        open_store("s3://bucket/run", options={"no_such_option": SECRET})


def test_the_choice_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="weightwire.store"):
        open_store(tmp_path).put("x", b"1")
    (record,) = caplog.records
    assert "FolderStore" in record.getMessage()


@pytest.mark.parametrize("url", ["s3://bucket/run", "hf://buckets/owner/name"])
def test_a_missing_library_says_what_to_install(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "find_spec", lambda _: None)
    with pytest.raises(ExtraMissing, match="pip install"):
        open_store(url)


def test_opening_a_folder_imports_no_client_library() -> None:
    code = (
        "import sys; from weightwire.store.open import open_store; open_store('memory://x');"
        " open_store('/tmp/x'); print({'obstore', 'huggingface_hub'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_the_environment_alone_opens_s3(
    s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_server.endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3_server.options["access_key_id"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3_server.options["secret_access_key"])
    prefix = uuid.uuid4().hex
    open_store(f"s3://{BUCKET}/{prefix}/").put("log/x", b"1")
    assert s3_server.open(prefix).read("log/x") == b"1"


def each_verb(store: ObjectStore) -> Iterator[tuple[str, object]]:
    yield "write", lambda: store.put("x", b"1")
    yield "write", lambda: store.put("x", iter([b"1"]))
    yield "create", lambda: store.create("x", b"1")
    yield "read", lambda: store.read("x")
    yield "list", lambda: list(store.list(""))
    yield "delete", lambda: store.delete(["x"])


def test_wrong_credentials_are_refused_without_repeating_them(s3_server: S3Server) -> None:
    options = {**s3_server.options, "secret_access_key": SECRET}
    for verb, call in each_verb(open_store(s3_server.url("x"), options=options)):
        with pytest.raises(StoreRefused, match=f"cannot {verb} .*SignatureDoesNotMatch") as caught:
            call()  # type: ignore[operator]
        assert SECRET not in str(caught.value)
        assert "Signature=" not in str(caught.value)


def test_a_bucket_that_is_not_there_is_refused(s3_server: S3Server) -> None:
    store = open_store("s3://no-such-bucket/run", options=s3_server.options)
    for verb, call in each_verb(store):
        with pytest.raises(StoreRefused, match=f"cannot {verb} s3://no-such-bucket/run"):
            call()  # type: ignore[operator]


def test_a_server_that_is_not_there_is_unavailable(s3_server: S3Server) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        options = {**s3_server.options, "endpoint": f"http://127.0.0.1:{unused.getsockname()[1]}"}
        for verb, call in each_verb(open_store(s3_server.url("x"), options=options)):
            with pytest.raises(StoreUnavailable, match=f"cannot {verb} "):
                call()  # type: ignore[operator]


@pytest.fixture
def dumb_server() -> Iterator[tuple[str, list[bytes], list[bytes]]]:
    """An HTTP server that gives one canned answer and notes what it was asked."""
    answers, asked = [b""], []
    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=_serve, args=(listening, answers, asked), daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}", answers, asked
        listening.shutdown(socket.SHUT_RDWR)
    thread.join()


def _serve(listening: socket.socket, answers: list[bytes], asked: list[bytes]) -> None:
    while True:
        try:
            connection, _ = listening.accept()
        except OSError:
            return
        with connection:
            asked.append(connection.recv(65536))
            connection.sendall(answers[0])


def canned(status: str, body: str = "") -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    return (head + body).encode()


def test_a_create_is_sent_once_however_the_server_fails(
    s3_server: S3Server, dumb_server: tuple[str, list[bytes], list[bytes]]
) -> None:
    endpoint, answers, asked = dumb_server
    store = open_store("s3://bucket/run", options={**s3_server.options, "endpoint": endpoint})
    conflict = "<Error><Code>ConditionalRequestConflict</Code></Error>"
    for answer in (
        b"",
        canned("500 Internal Server Error"),
        canned("503 Slow Down"),
        canned("429 Too Many Requests"),
        canned("409 Conflict", conflict),
    ):
        answers[0] = answer
        asked.clear()
        with pytest.raises(StoreUnavailable):
            store.create("log/1", b"record")
        assert len(asked) == 1
        assert b"if-none-match: *" in asked[0].lower()


def test_an_object_in_the_way_is_told_in_both_words(
    s3_server: S3Server, dumb_server: tuple[str, list[bytes], list[bytes]]
) -> None:
    endpoint, answers, _ = dumb_server
    store = open_store("s3://bucket/run", options={**s3_server.options, "endpoint": endpoint})
    for status in ("412 Precondition Failed", "409 Conflict"):
        answers[0] = canned(status, "<Error><Code>BlobAlreadyExists</Code></Error>")
        assert store.create("log/1", b"record") is False


def test_one_missing_object_does_not_save_the_others_where_obstore_stops_at_it(
    tmp_path: Path,
) -> None:
    from obstore.store import LocalStore

    handle = LocalStore(tmp_path)
    store = ObstoreStore(handle, handle, "local")
    for key in ("a", "c", "e"):
        store.put(key, b"x")
    store.delete(["a", "b", "c", "d", "e"])
    assert list(store.list("")) == []
