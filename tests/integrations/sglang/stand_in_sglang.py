"""A stand-in for an SGLang server: its routes, its call of the loader, its ways to die. Not SGLang.

    python stand_in_sglang.py PORT N_RANKS [--old] [--no-loader]

SGLang itself needs CUDA. This process has what its interface promises and what a client must mind:
one process for each rank; the loader called there as ``fn(model, named_tensors)``; a payload for
each rank whose unpickling is restricted; updates refused outside a session (``--old``: no such
routes); updates that wait until nothing runs unless the server is paused; a loader that raises
ends the server.
"""

from __future__ import annotations

import base64
import importlib
import io
import json
import multiprocessing
import os
import pickle
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection
from typing import Any

from stand_in_model import StandInModel, checkpoint

LOADER = "weightwire.engines.sglang.load"
_ALLOWED = {
    ("torch", "Tensor"),
    ("torch", "Size"),
    ("torch", "uint8"),
    ("torch.storage", "UntypedStorage"),
    ("torch.multiprocessing.reductions", "rebuild_tensor"),
    ("torch.multiprocessing.reductions", "rebuild_typed_storage"),
    ("torch.multiprocessing.reductions", "rebuild_storage_empty"),
}
"""Of what SGLang lets a payload name, all that a command may need: nothing with shared memory."""


class RestrictedUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"{module}.{name} is not allowed")
        return super().find_class(module, name)


def run_rank(rank: int, n_ranks: int, pipe: Connection) -> None:
    """A tensor-parallel worker: one command after the other, as between forward passes."""
    model = StandInModel(rank, n_ranks)
    model.load_weights(checkpoint(seed=99).items())
    while True:
        try:
            what, body = pipe.recv()
        except EOFError:  # the server was killed
            return
        if what == "update":
            raw = base64.b64decode(body["serialized_named_tensors"][rank], validate=True)
            pairs = RestrictedUnpickler(io.BytesIO(raw)).load()
            module, _, name = body["load_format"].rpartition(".")
            getattr(importlib.import_module(module), name)(model, pairs)
            pipe.send(True)
        else:  # a forward pass, or the checker: both look at every parameter
            pipe.send(model.sha256s())


class StandIn:
    """The server's state, and its routes."""

    def __init__(self, n_ranks: int, *, is_old: bool, has_loader: bool) -> None:
        self.n_ranks, self.is_old, self.has_loader = n_ranks, is_old, has_loader
        self.is_paused = self.has_session = False
        self.weight_version = "default"
        self.n_flushes, self.pauses = 0, list[str]()
        self.turn = threading.Condition()
        self.n_running = 0
        self.talk = threading.Lock()
        context = multiprocessing.get_context("spawn")
        self.pipes = []
        for rank in range(n_ranks):
            ours, theirs = context.Pipe()
            context.Process(target=run_rank, args=(rank, n_ranks, theirs), daemon=True).start()
            theirs.close()
            self.pipes.append(ours)

    def every_rank(self, what: str, body: Any) -> list[Any]:
        with self.talk:
            for pipe in self.pipes:
                pipe.send((what, body))
            try:
                return [pipe.recv() for pipe in self.pipes]
            except EOFError:
                os._exit(9)  # a scheduler died: so does SGLang

    def routes(self) -> dict[str, Callable[[dict[str, Any]], tuple[int, Any]]]:
        routes = {
            "/get_server_info" if self.is_old else "/server_info": self.server_info,
            "/pause_generation": self.pause,
            "/continue_generation": self.go_on,
            "/update_weights_from_tensor": self.update,
            "/weights_checker": self.check,
            "/generate": self.generate,
            "/model_info": self.model_info,
        }
        if not self.is_old:
            routes |= {"/begin_weight_update": self.begin, "/end_weight_update": self.end}
        return routes

    def server_info(self, _: dict[str, Any]) -> tuple[int, Any]:
        loaders = [LOADER] if self.has_loader else []
        return 200, {"tp_size": self.n_ranks, "dp_size": 1, "custom_weight_loader": loaders}

    def model_info(self, _: dict[str, Any]) -> tuple[int, Any]:
        return 200, {
            "weight_version": self.weight_version,
            "n_flushes": self.n_flushes,
            "pauses": self.pauses,
            "is_paused": self.is_paused,
        }

    def pause(self, body: dict[str, Any]) -> tuple[int, Any]:
        with self.turn:
            self.is_paused = True
            self.pauses.append(body["mode"])
            self.turn.wait_for(lambda: self.n_running == 0)
        return 200, {"status": "ok"}

    def go_on(self, _: dict[str, Any]) -> tuple[int, Any]:
        with self.turn:
            self.is_paused = False
            self.turn.notify_all()
        return 200, {"status": "ok"}

    def begin(self, _: dict[str, Any]) -> tuple[int, Any]:
        if self.has_session:
            return 400, {"success": False, "message": "a session is open"}
        self.has_session = True
        return 200, {"success": True, "message": "Success"}

    def end(self, _: dict[str, Any]) -> tuple[int, Any]:
        was, self.has_session = self.has_session, False
        return (200 if was else 400), {"success": was, "message": ""}

    def update(self, body: dict[str, Any]) -> tuple[int, Any]:
        if not self.is_old and not self.has_session:
            return 400, {"success": False, "message": "outside of a session"}
        if body.get("load_format") != LOADER or not self.has_loader:
            return 400, {"success": False, "message": "unknown load_format"}
        with self.turn:
            self.turn.wait_for(lambda: self.n_running == 0)
            self.every_rank("update", body)
        self.weight_version = body.get("weight_version") or self.weight_version
        self.n_flushes += bool(body.get("flush_cache", True))
        return 200, {"success": True, "message": "Success"}

    def check(self, _: dict[str, Any]) -> tuple[int, Any]:
        return 200, {"success": True, "ranks": self.every_rank("look", None)}

    def generate(self, _: dict[str, Any]) -> tuple[int, Any]:
        with self.turn:
            self.turn.wait_for(lambda: not self.is_paused)
            self.n_running += 1
        try:
            seen, version = self.every_rank("look", None), self.weight_version
            return 200, {"seen": seen, "weight_version": version}
        finally:
            with self.turn:
                self.n_running -= 1
                self.turn.notify_all()


def serve(port: int, stand_in: StandIn) -> None:
    routes = stand_in.routes()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.do_POST()

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            route = routes.get(self.path)
            code, answer = route(json.loads(body or b"{}")) if route else (404, {})
            raw = json.dumps(answer).encode()
            self.send_response(code)
            self.send_header("Content-Length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    print(server.server_address[1], flush=True)
    server.serve_forever()


if __name__ == "__main__":
    flags = set(sys.argv[3:])
    made = StandIn(int(sys.argv[2]), is_old="--old" in flags, has_loader="--no-loader" not in flags)
    serve(int(sys.argv[1]), made)
