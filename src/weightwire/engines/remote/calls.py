"""JSON over HTTP to one server, with the standard library, on one connection that is kept open."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Mapping
from typing import Any, Protocol
from urllib.parse import urlencode, urlsplit

from weightwire.clock import Clock
from weightwire.errors import EngineRefused, EngineUnavailable

_IDLE_S = 2.0
"""Servers close connections that idle for five seconds; one that idled this long is not used again."""
_SHOWN = 1000


class Routes(Protocol):
    """What a server answers to, wherever it runs."""

    url: str

    def get(self, path: str, **query: object) -> Any:
        """Ask."""

    def post(self, path: str, body: Mapping[str, Any] | None = None, **query: object) -> Any:
        """Have something done."""

    def close(self) -> None:
        """Let go of connections."""


class Calls:
    """One server's routes. Nothing is repeated: who calls knows what may be."""

    def __init__(self, url: str, api_key: str | None, timeout_s: float, clock: Clock) -> None:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise EngineRefused(f"{url!r:.200} is not a server: give http://host:port")
        self.url = f"{parts.scheme}://{parts.netloc}"
        self._parts, self._timeout_s, self._clock = parts, timeout_s, clock
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._connection: http.client.HTTPConnection | None = None
        self._used_at = 0.0
        self._lock = threading.Lock()

    def get(self, path: str, **query: object) -> Any:
        """The answer to a GET.

        Raises:
            the same as ``post``.
        """
        return self._ask("GET", path, query, None)

    def post(self, path: str, body: Mapping[str, Any] | None = None, **query: object) -> Any:
        """The answer to a POST.

        Raises:
            EngineUnavailable: no answer; it may have been done or not.
            EngineRefused: an answer that says no.
        """
        return self._ask("POST", path, query, body)

    def close(self) -> None:
        """Close the connection; the next call opens another."""
        with self._lock:
            self._drop()

    def _ask(
        self, verb: str, path: str, query: Mapping[str, object], body: Mapping[str, Any] | None
    ) -> Any:
        target = self._parts.path.rstrip("/") + path + (f"?{urlencode(query)}" if query else "")
        text = None if body is None else json.dumps(body)
        with self._lock:
            try:
                status, answer = self._exchange(verb, target, text)
            except (OSError, http.client.HTTPException) as error:
                self._drop()
                raise EngineUnavailable(f"{self.url}{path}: no answer: {error!r}") from error
        return self._read(path, status, answer)

    def _exchange(self, verb: str, target: str, text: str | None) -> tuple[int, bytes]:
        if self._clock.monotonic() - self._used_at > _IDLE_S:
            self._drop()
        if self._connection is None:
            secure = self._parts.scheme == "https"
            kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
            self._connection = kind(self._parts.netloc, timeout=self._timeout_s)
        self._connection.request(verb, target, text, self._headers)
        answer = self._connection.getresponse()
        content = answer.read()
        self._used_at = self._clock.monotonic()
        if answer.status >= http.HTTPStatus.INTERNAL_SERVER_ERROR:
            # After an error of its own the server closes the connection without a word.
            self._drop()
        return answer.status, content

    def _drop(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _read(self, path: str, status: int, content: bytes) -> Any:
        shown = content[:_SHOWN].decode(errors="replace")
        if status == http.HTTPStatus.NOT_FOUND:
            raise EngineRefused(
                f"{self.url}{path}: no such route; start vLLM with VLLM_SERVER_DEV_MODE=1"
            )
        if status != http.HTTPStatus.OK:
            raise EngineRefused(f"{self.url}{path}: {status} {shown}")
        try:
            return json.loads(content) if content else None
        except ValueError as error:
            raise EngineUnavailable(f"{self.url}{path}: no JSON: {shown}") from error
