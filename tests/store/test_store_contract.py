"""Every store keeps the contract."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest
from stand_in_hub import StandInHub

from weightwire.clock import SystemClock
from weightwire.store.contract import ObjectStore
from weightwire.store.counting import CountingStore
from weightwire.store.folder import FolderStore
from weightwire.store.hub import HubStore
from weightwire.store.memory import MemoryStore
from weightwire.store.retry import RetryingStore, RetryPolicy
from weightwire.testing.seaweed import S3Server
from weightwire.testing.store_contract import StoreContract


class TestMemory(StoreContract):
    most_memory_mib = None

    def make_store(self) -> ObjectStore:
        return MemoryStore()


class TestFolder(StoreContract):
    @pytest.fixture(autouse=True)
    def _given(self, tmp_path: Path) -> None:
        self.folder = tmp_path / "a" / "store"

    def make_store(self) -> ObjectStore:
        return FolderStore(self.folder)


class TestS3(StoreContract):
    @pytest.fixture(autouse=True)
    def _given(self, s3_server: S3Server) -> None:
        self.server = s3_server

    def make_store(self) -> ObjectStore:
        return self.server.open(f"runs-{uuid.uuid4().hex}/run-7")


class TestHubStandIn(StoreContract):
    """The hub itself cannot be reached from tests; the stand-in has its call signatures."""

    @pytest.fixture(autouse=True)
    def _given(self, tmp_path: Path) -> None:
        self.folder = tmp_path

    def make_store(self) -> ObjectStore:
        return HubStore("owner/bucket", "runs/7", StandInHub(self.folder))


class TestWrappedFolder(StoreContract):
    """What wraps a store keeps the contract too."""

    @pytest.fixture(autouse=True)
    def _given(self, tmp_path: Path) -> None:
        self.folder = tmp_path

    def make_store(self) -> ObjectStore:
        counted = CountingStore(FolderStore(self.folder))
        return RetryingStore(counted, SystemClock(), RetryPolicy())
