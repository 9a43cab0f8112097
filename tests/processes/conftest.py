"""One S3 server for all tests of this folder, started when the first asks for it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from weightwire.testing.seaweed import S3Server, seaweed_server


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """SeaweedFS; with pytest-xdist, one per worker. If it cannot start, tests fail with its log."""
    with seaweed_server(tmp_path_factory.mktemp("s3")) as server:
        yield server
