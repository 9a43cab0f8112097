"""A running SGLang server, as a trainer or a sidecar sees it: connect, stage, activate, prove.

    stage ──▶ every rank fetches, decodes, proves, while requests run
    activate: pause ─▶ begin ─▶ update ─▶ end ─▶ continue
              └──────── nothing generates ────────┘

The server goes on whatever happens, with one exception: where ranks hold different versions it
stays paused, because what it would generate is of no version at all. Updating it again mends that.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from weightwire.clock import Clock, SystemClock
from weightwire.engines.remote.calls import Calls
from weightwire.engines.remote.server import RemoteServer
from weightwire.engines.remote.server_status import Mode, Pause, ServerStatus, pause_of
from weightwire.engines.sglang.command import LOADER, Command, payload
from weightwire.engines.sglang.mailbox import Mailbox
from weightwire.errors import Dirty, EngineRefused, EngineUnavailable

_PAUSES = {"keep": "retract", "abort": "abort"}
"""SGLang's names. Retracted requests compute their caches anew; ``in_place`` would keep old ones."""


class SglangServer(RemoteServer):
    """One server, of one or several tensor-parallel ranks."""

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        mailbox: str | os.PathLike[str] | None = None,
        timeout_s: float = 600.0,
        clock: Clock | None = None,
    ) -> None:
        """Nothing is sent yet.

        Args:
            url: ``http://host:port``.
            api_key: the server's ``--admin-api-key`` or ``--api-key``, if it has one.
            mailbox: a folder that this process and every rank see by this path; by default a
                temporary one, for a server on this host.
            timeout_s: how long one request, or the staging of one version, may take.
        """
        self._clock = clock or SystemClock()
        self._calls = Calls(url, api_key, timeout_s, self._clock)
        self._timeout_s = timeout_s
        self._temporary = (
            None if mailbox is not None else tempfile.TemporaryDirectory(prefix="weightwire-")
        )
        self._mailbox = Mailbox(mailbox if mailbox is not None else self._temporary.name)  # type: ignore[union-attr]
        self._n_ranks, self._turn = 0, 0
        self._has_sessions = True

    @property
    def url(self) -> str:
        """Where it is."""
        return self._calls.url

    def connect(
        self,
        store: str | os.PathLike[str],
        *,
        key: str | None = None,
        worker: str | None = None,
        cache: str | os.PathLike[str] | None = None,
        options: Mapping[str, str] | None = None,
        update: bool = True,
    ) -> ServerStatus:
        """Tell every rank which run to follow, and bring the server to its newest version.

        The server pauses for a moment, because SGLang talks to its ranks only then; requests in
        flight keep their caches and go on.

        Args:
            store: as the server sees it: a folder there, or a URL with the credentials in the
                server's environment.
            key: follow only what this public key signed.
            cache: a folder on the server's host that saves a restarted server the download.
            options: for the store; they travel as they are, so no secrets over an open network.
            update: False to leave the weights as they are for now.

        Raises:
            EngineRefused: the server was not started with ``--custom-weight-loader``.
            WeightwireError: what the ranks ran into: no such run, a layout they cannot serve …
        """
        self._n_ranks = self._require_set_up()
        self._mailbox.folder.mkdir(parents=True, exist_ok=True)
        self._mailbox.forget(self._n_ranks)
        self._turn = 0
        command = Command(
            do="connect",
            rank=0,
            n_ranks=self._n_ranks,
            store=os.fspath(store),
            mailbox=str(self._mailbox.folder),
            key=key,
            worker=worker,
            cache=os.fspath(cache) if cache else None,
            options=dict(options or {}),
        )
        self._calls.post("/pause_generation", {"mode": "in_place"})
        try:
            self._tell(command, flush_cache=False)
        finally:
            self._continue()
        status = self.status()
        status.require_done()
        if update and status.newest >= 0 and status.version != status.newest:
            self.update(status.newest)
        return self.status()

    def status(self) -> ServerStatus:
        """Where every rank stood a moment ago.

        Raises:
            EngineRefused: not connected.
            EngineUnavailable: a rank has not said anything since.
        """
        reports = self._mailbox.reports(self._n_ranks)
        if not reports:
            raise EngineRefused(f"{self.url} is not connected; call connect()")
        missing = [str(rank) for rank, report in enumerate(reports) if report is None]
        if missing:
            raise EngineUnavailable(
                f"{self.url}: nothing from rank {', '.join(missing)} in {self._mailbox.folder};"
                " does the server see this folder?"
            )
        return ServerStatus(tuple(report for report in reports if report is not None))

    def stage(self, version: int) -> None:
        """Ask every rank to stage a version; generation goes on, and this does not wait."""
        self._turn += 1
        self._mailbox.want(version, self._turn)

    def activate(self, version: int, *, mode: Mode = "keep") -> Pause:
        """Pause, write the staged version on every rank, empty the cache, go on.

        Raises:
            EngineRefused: not every rank has staged it, or a mode SGLang does not have; nothing was
                done.
            Dirty: some ranks hold the new version, some do not; the server was left paused.
            WeightwireError: what a rank ran into; the server serves what it had.
        """
        if mode not in _PAUSES:
            raise EngineRefused(f"SGLang cannot pause by {mode!r}; choose: {', '.join(_PAUSES)}")
        if not self.status().is_ready(version):
            raise EngineRefused(f"version {version} is not staged on every rank; stage it first")
        began = self._clock.monotonic()
        self._calls.post("/pause_generation", {"mode": _PAUSES[mode]})
        drained = self._clock.monotonic()
        try:
            command = Command("activate", 0, self._n_ranks, version)
            self._tell(command, flush_cache=True, weight_version=str(version))
        finally:
            self._continue_unless_mixed()
        ended = self._clock.monotonic()
        status = self.status()
        status.require_done()
        return pause_of(version, status, began, drained, ended)

    def close(self) -> None:
        """Let go; the ranks notice that the mailbox is gone and follow no more."""
        self._calls.close()
        if self._temporary is not None:
            self._temporary.cleanup()

    def _heard(self) -> ServerStatus | None:
        """Where the ranks stand, once all of them have heard what is wanted."""
        reports = self._mailbox.reports(self._n_ranks, self._turn)
        return None if None in reports else ServerStatus(tuple(r for r in reports if r))

    def _tell(self, command: Command, **options: object) -> None:
        """A command to every rank; the server must be paused. SGLang asks for a session around it.

        Raises:
            EngineRefused, EngineUnavailable: the server's own.
        """
        ranks = [replace(command, rank=rank) for rank in range(self._n_ranks)]
        body = {
            "serialized_named_tensors": [payload(each) for each in ranks],
            "load_format": LOADER,
            **options,
        }
        self._session("begin")
        try:
            self._calls.post("/update_weights_from_tensor", body)
        finally:
            self._session("end")

    def _session(self, what: Literal["begin", "end"]) -> None:
        """Releases before sessions have no such route, and need none."""
        if not self._has_sessions:
            return
        try:
            self._calls.post(f"/{what}_weight_update", {})
        except EngineRefused as error:
            if not _is_no_route(error):
                raise
            self._has_sessions = False

    def _continue_unless_mixed(self) -> None:
        """Let it run again.

        Raises:
            Dirty: ranks hold different versions; the server stays paused.
        """
        status = self.status()
        if status.is_mixture:
            raise Dirty(f"{self.url} was left paused: {status.held}; update it again")
        self._continue()

    def _continue(self) -> None:
        self._calls.post("/continue_generation", {"torch_empty_cache": False})

    def _require_set_up(self) -> int:
        """The number of ranks of a server that has our loader.

        Raises:
            EngineRefused: says how to start it.
        """
        info = self._server_info()
        if LOADER not in (info.get("custom_weight_loader") or []):
            raise EngineRefused(f"{self.url} was not started with --custom-weight-loader {LOADER}")
        if int(info.get("dp_size") or 1) != 1:
            raise EngineRefused(f"{self.url}: SGLang takes tensors only with --dp-size 1")
        return int(info.get("tp_size") or 1)

    def _server_info(self) -> dict[str, Any]:
        """How the server was started; older releases have it under another name."""
        try:
            return dict(self._calls.get("/server_info"))
        except EngineRefused as error:
            if not _is_no_route(error):
                raise
            return dict(self._calls.get("/get_server_info"))


def _is_no_route(error: EngineRefused) -> bool:
    """Whether the server is of a release that has no such route."""
    return "no such route" in str(error)
