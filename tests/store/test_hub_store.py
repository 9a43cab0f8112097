# ruff: noqa: ARG002 - the signatures are the hub's
"""The Hugging Face adapter beyond the contract, on a stand-in: the hub cannot be reached here."""

from __future__ import annotations

import inspect
from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub import HfApi
from huggingface_hub.errors import EntryNotFoundError, LocalTokenNotFoundError
from stand_in_hub import StandInHub

from weightwire.errors import ObjectMissing, StoreRefused, StoreUnavailable
from weightwire.store.hub import HubClient, HubStore

CALLS = (
    "batch_bucket_files",
    "download_bucket_files",
    "list_bucket_tree",
    "get_bucket_paths_info",
)


@pytest.mark.parametrize("call", CALLS)
def test_the_stand_in_takes_what_the_real_client_takes(call: str) -> None:
    real = inspect.signature(getattr(HfApi, call)).parameters
    ours = inspect.signature(getattr(StandInHub, call)).parameters
    assert [(p.name, p.kind, p.default) for p in ours.values()] == [
        (p.name, p.kind, p.default) for p in real.values()
    ]


@pytest.mark.parametrize("call", CALLS)
def test_what_the_adapter_sends_is_what_the_real_client_takes(call: str) -> None:
    real = inspect.signature(getattr(HfApi, call)).parameters
    for parameter in inspect.signature(getattr(HubClient, call)).parameters.values():
        assert parameter.kind == real[parameter.name].kind


def test_reading_in_parts_downloads_once(tmp_path: Path) -> None:
    hub = StandInHub(tmp_path)
    store = HubStore("owner/bucket", client=hub)
    store.put("a", bytes(1000))
    assert b"".join(store.read("a", at, at + 100) for at in range(0, 1000, 100)) == bytes(1000)
    assert hub.n_downloads == 1
    store.put("a", b"changed")
    assert store.read("a", 0, 3) == b"cha"


def test_prefixes_keep_runs_apart(tmp_path: Path) -> None:
    hub = StandInHub(tmp_path)
    one, two = (HubStore("owner/bucket", run, hub) for run in ("runs/1", "runs/10"))
    one.put("a", b"1")
    two.put("a", b"2")
    assert [info.key for info in one.list("")] == ["a"]
    assert (one.read("a"), two.read("a")) == (b"1", b"2")


def test_a_create_that_another_overwrote_is_not_ours(tmp_path: Path) -> None:
    class SecondWriter(StandInHub):
        def batch_bucket_files(self, bucket_id: str, **change: object) -> None:  # type: ignore[override]
            super().batch_bucket_files(bucket_id, **change)  # type: ignore[arg-type]
            super().batch_bucket_files(bucket_id, add=[(b"theirs", "log/1")])

    assert HubStore("owner/bucket", client=SecondWriter(tmp_path)).create("log/1", b"ours") is False


def test_a_create_that_cannot_be_read_back_is_in_doubt(tmp_path: Path) -> None:
    class Forgetful(StandInHub):
        def batch_bucket_files(self, bucket_id: str, **change: object) -> None:  # type: ignore[override]
            """Nothing is kept."""

    with pytest.raises(StoreUnavailable):
        HubStore("owner/bucket", client=Forgetful(tmp_path)).create("log/1", b"ours")


def with_status(code: int) -> Exception:
    error = OSError(f"{code} for url: https://host/x?token=hunter2")
    error.response = SimpleNamespace(status_code=code)  # type: ignore[attr-defined]
    return error


@pytest.mark.parametrize(
    ("raised", "mapped"),
    [
        (with_status(401), StoreRefused),
        (with_status(403), StoreRefused),
        (with_status(404), StoreRefused),
        (with_status(429), StoreUnavailable),
        (with_status(503), StoreUnavailable),
        (ConnectionError("offline"), StoreUnavailable),
        (TimeoutError("slow"), StoreUnavailable),
        (RuntimeError("xet: connection reset"), StoreUnavailable),
        (LocalTokenNotFoundError("log in"), StoreRefused),
    ],
)
def test_errors_of_the_client_become_errors_of_the_store(
    tmp_path: Path, raised: Exception, mapped: type[Exception]
) -> None:
    class Failing(StandInHub):
        def get_bucket_paths_info(self, *given: object, **named: object) -> object:  # type: ignore[override]
            raise raised

    store = HubStore("owner/bucket", client=Failing(tmp_path))  # type: ignore[arg-type]
    for call in (lambda: store.read("a"), lambda: store.delete(["a"])):
        with pytest.raises(mapped) as caught:
            call()
        assert "hunter2" not in str(caught.value)


def test_an_object_that_vanishes_before_its_download_is_missing(tmp_path: Path) -> None:
    class Collected(StandInHub):
        def download_bucket_files(self, *given: object, **named: object) -> None:  # type: ignore[override]
            raise EntryNotFoundError("gone")

    store = HubStore("owner/bucket", client=Collected(tmp_path))
    store.put("a", b"x")
    with pytest.raises(ObjectMissing):
        store.read("a")
