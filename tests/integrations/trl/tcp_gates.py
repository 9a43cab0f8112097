"""A port that leads to a server, and can be shut: a server that is away and comes back."""

from __future__ import annotations

import contextlib
import socket
import threading
from urllib.parse import urlsplit


class Gate:
    """Passes bytes on while open; while shut, whoever comes is turned away. A context manager."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._target = (parts.hostname, parts.port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._is_open = threading.Event()
        self._is_open.set()
        self._open: list[socket.socket] = []
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._threads = [threading.Thread(target=self._accept)]

    def open(self) -> None:
        """Let callers through."""
        self._is_open.set()

    def shut(self) -> None:
        """Cut every connection, and turn callers away."""
        self._is_open.clear()
        for each in self._open:
            _end(each)
        self._open.clear()

    def __enter__(self) -> Gate:
        self._threads[0].start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shut()
        _end(self._listener)
        for thread in self._threads:
            thread.join()

    def _accept(self) -> None:
        while True:
            try:
                caller, _ = self._listener.accept()
            except OSError:
                return
            if self._is_open.is_set():
                self._join(caller)
            else:
                caller.close()

    def _join(self, caller: socket.socket) -> None:
        server = socket.create_connection(self._target)
        self._open += [caller, server]
        for source, target in ((caller, server), (server, caller)):
            thread = threading.Thread(target=_pass, args=(source, target))
            self._threads.append(thread)
            thread.start()


def _pass(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
    _end(source)
    _end(target)


def _end(each: socket.socket) -> None:
    with contextlib.suppress(OSError):
        each.shutdown(socket.SHUT_RDWR)
    each.close()
