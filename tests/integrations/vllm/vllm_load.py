"""Bounded load on a server: a few clients that stream completions one after the other."""

from __future__ import annotations

import json
import threading
import urllib.request
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from vllm_servers import Server

_N_TOKENS = 48


@dataclass
class Load(AbstractContextManager["Load"]):
    """Runs while the context is open; each request must give every token it was asked for."""

    server: Server
    n_clients: int = 4
    n_done: int = 0
    n_tokens: int = 0
    failures: list[str] = field(default_factory=list)

    def __enter__(self) -> Load:
        self._stop, self._lock = threading.Event(), threading.Lock()
        self._clients = [
            threading.Thread(target=self._ask, args=(index,)) for index in range(self.n_clients)
        ]
        for client in self._clients:
            client.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for client in self._clients:
            client.join(timeout=120)

    def _ask(self, index: int) -> None:
        n_asked = 0
        while not self._stop.is_set():
            try:
                n_tokens = stream(self.server, list(f"client {index} asks {n_asked}".encode()))
                is_whole = n_tokens == _N_TOKENS
                failure = "" if is_whole else f"{n_tokens} tokens instead of {_N_TOKENS}"
            except OSError as error:
                n_tokens, failure = 0, repr(error)
            n_asked += 1
            with self._lock:
                self.n_done += 1
                self.n_tokens += n_tokens
                self.failures += [failure] if failure else []


def stream(server: Server, prompt: list[int]) -> int:
    """One streamed completion; how many tokens came."""
    body = {
        "model": server.model,
        "prompt": prompt,
        "max_tokens": _N_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    request = urllib.request.Request(
        server.url + "/v1/completions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    n_tokens = 0
    with urllib.request.urlopen(request, timeout=120) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    n_tokens += len(choice.get("token_ids") or ())
    return n_tokens
