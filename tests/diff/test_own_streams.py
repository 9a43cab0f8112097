"""Streams of our own, seen without a GPU: which device a thread is on, and when."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from weightwire.kernels.devices import on_stream


def test_a_stream_is_left_before_its_device_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """To leave a stream of another device begins the one that a thread was on before."""
    seen: list[str] = []

    def noted(what: str) -> Callable[[Any], AbstractContextManager[None]]:
        @contextmanager
        def entered(_: Any) -> Iterator[None]:
            seen.append(f"enter {what}")
            yield
            seen.append(f"leave {what}")

        return entered

    monkeypatch.setattr(torch.cuda, "device", noted("device"))
    monkeypatch.setattr(torch.cuda, "stream", noted("stream"))
    with on_stream(SimpleNamespace(device=torch.device("cuda", 5))):  # type: ignore[arg-type]
        seen.append("work")
    assert seen == ["enter device", "enter stream", "work", "leave stream", "leave device"]
