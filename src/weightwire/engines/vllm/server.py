"""A running vLLM server, as a trainer or a sidecar sees it: connect, stage, activate, prove.

    stage ──▶ every rank fetches, decodes, proves, while requests run
    activate: begin ─▶ start ─▶ ┌ pause ─▶ update ─▶ finish ┐ ─▶ resume ─▶ end
                                └──── nothing generates ────┘

The server is resumed whatever happens, with one exception: where ranks hold different versions it
stays paused, because what it would generate is of no version at all. Updating it again mends that.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from weightwire.clock import Clock, SystemClock
from weightwire.engines.remote.calls import Calls, Routes
from weightwire.engines.remote.proof import parse_proof, prove
from weightwire.engines.remote.server import RemoteServer
from weightwire.engines.remote.server_status import Mode, Pause, ServerStatus, pause_of
from weightwire.engines.remote.status import parse_status
from weightwire.engines.vllm.pausing import Pausing, await_end, await_stop
from weightwire.engines.vllm.set_up import connection_to, require_set_up
from weightwire.errors import Dirty, EngineRefused, EngineUnavailable, WeightwireError
from weightwire.workers import threads


class VllmServer(RemoteServer):
    """Keeps one vLLM server at the version it is told.

    Start it with ``VLLM_SERVER_DEV_MODE=1``, ``--weight-transfer-config '{"backend": "weightwire"}'``
    and ``--worker-extension-cls weightwire.engines.vllm.worker.WeightwireWorker``.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        timeout_s: float = 600.0,
        takeover_s: float = 30.0,
        clock: Clock | None = None,
    ) -> None:
        """Nothing is sent yet.

        Args:
            timeout_s: for one answer, and for staging.
            takeover_s: a client whose activation began so long ago is taken for dead.

        Raises:
            EngineRefused: not a URL.
        """
        self._clock = clock or SystemClock()
        self._calls: Routes = Calls(url, api_key, timeout_s, self._clock)
        another = Calls(url, api_key, timeout_s, self._clock)
        self._pausing = Pausing(another, threads(1, "pause"))
        self._timeout_s, self._takeover_s = timeout_s, takeover_s

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
        retry_s: float | None = None,
        update: bool = True,
    ) -> ServerStatus:
        """Tell every rank which run to follow, and bring the server to the newest version of it.

        Nothing is done by halves or twice: a server that is connected just so stays as it is.

        Args:
            store: a folder that is the same on the server's host, or a URL with the credentials
                in the server's environment.
            key: follow only what this public key signed.
            cache: a folder on the server's host that saves a restarted server the download.
            options: for the store; they travel as they are, so no secrets over an open network.
            retry_s: give a store that does not answer so long before staging fails.
            update: False to leave the weights as they are for now.

        Raises:
            EngineRefused: the server was not started for this.
            WeightwireError: what the ranks ran into: no such run, a layout they cannot serve …
        """
        require_set_up(self._calls)
        init_info = connection_to(
            store, key=key, worker=worker, cache=cache, options=options, retry_s=retry_s
        )
        if any(rank.connection != init_info["connection"] for rank in self.status().ranks):
            self._tell("/init_weight_transfer_engine", {"init_info": init_info})
        newest = self.newest() if update else -1
        if newest >= 0 and self.status().version != newest:
            self.update(newest)
        return self.status()

    def newest(self) -> int:
        """The newest version that every rank sees in the store; -1 before the first.

        Raises:
            WeightwireError: what a rank ran into.
        """
        before = self._rpc("weightwire_poll")
        before.require_done()
        for status in self._looks(self.status):
            if status.has_polled_since(before):
                status.require_sound()
                return status.newest
        raise EngineUnavailable(f"{self.url}: the ranks did not reach the store in time")

    def status(self) -> ServerStatus:
        """Where every rank stands.

        Raises:
            EngineUnavailable, EngineRefused: the server does not say.
        """
        return self._rpc("weightwire_status")

    def stage(self, version: int) -> None:
        """Begin to stage a version on every rank; generation goes on, and this does not wait.

        Raises:
            EngineUnavailable, EngineRefused: the server's own; staging's are raised by ``wait_staged``.
        """
        self._rpc("weightwire_stage", version=version).require_done()

    def activate(self, version: int, *, mode: Mode = "keep", inside_pause: bool = False) -> Pause:
        """Pause, write the staged version on every rank, set the version stamp, resume.

        The prefix cache is emptied in the pause, and with ``mode="keep"`` requests in flight
        compute theirs anew: what they generate from then on is exactly what the new version
        generates after the tokens they have.

        Args:
            inside_pause: the caller has paused the server, and will resume it.

        Raises:
            EngineRefused: not staged, asleep, or paused by somebody else; nothing was done.
            Dirty: some ranks hold the new version, some do not; the server was left paused.
            WeightwireError: what a rank ran into; the server serves what it had.
        """
        is_paused = bool(self._calls.get("/is_paused")["is_paused"])
        found = self.status()
        is_left_over = found.is_left_over
        if is_paused and not is_left_over and not inside_pause:
            raise EngineRefused(
                f"{self.url} is paused or asleep, by somebody else; resume it first"
            )
        if inside_pause and not is_paused:
            raise EngineRefused(f"{self.url} is not paused, and should be: pause it first")
        is_ours = not inside_pause
        begun = self._rpc(
            "weightwire_begin",
            version=version,
            was_paused=not is_ours,
            takeover_s=self._takeover_s,
        )
        try:
            begun.require_done()
        except WeightwireError:
            if any(rank.refused is None for rank in begun.ranks):
                self._rpc("weightwire_end")
            raise
        return self._swap(version, mode, is_ours, is_alone=found.n_replicas == 1)

    def prove(self, version: int, digest: str) -> int:
        """Prove from live memory that all ranks together hold a version, to the last bit.

        ``digest`` is what the publisher says of it: ``Published.digest``, or ``weightwire log``.
        Requests run meanwhile. Gives the number of tensors.

        Raises:
            TargetMismatch: they hold something else; names it.
            WeightwireError: what a rank ran into.
        """
        self._rpc("weightwire_begin_proof").require_done()
        for found in self._looks(lambda: self._ask("weightwire_proof")):
            if all("proof" in each for each in found):
                return prove([parse_proof(each["proof"]) for each in found], version, digest)
            ServerStatus(tuple(parse_status(each) for each in found)).require_done()
        raise EngineUnavailable(f"{self.url}: live memory was not read in time")

    def abort(self) -> None:
        """Forget what is staged; from any state, and the server runs afterwards.

        Raises:
            EngineUnavailable, EngineRefused: the server's own.
            Dirty: ranks hold different versions; it stays paused.
        """
        found = self.status()
        self._rpc("weightwire_abort").require_done()
        if found.is_left_over:
            self._resume(found)

    def close(self) -> None:
        """Close the connections; the server goes on."""
        self._pausing.close()
        self._calls.close()

    def _swap(self, version: int, mode: Mode, is_ours: bool, *, is_alone: bool) -> Pause:
        """The part between begin and end. ``start`` writes nothing, so it comes before the pause."""
        self._tell("/start_weight_update")
        began = self._clock.monotonic()
        pausing = self._pausing.begin(mode)
        try:
            await_stop(pausing, self._calls, may_be_quick=is_alone and mode == "keep")
            drained = self._clock.monotonic()
            self._tell("/update_weights", {"update_info": {"version": version}})
            pausing.result()
            self._calls.post("/finish_weight_update", {"weight_version": str(version)})
        except BaseException:
            await_end(pausing)
            self._give_up(is_ours)
            raise
        if is_ours:
            self._calls.post("/resume")
        ended = self._clock.monotonic()
        return pause_of(version, self._rpc("weightwire_end"), began, drained, ended)

    def _give_up(self, is_ours: bool) -> None:
        """After a failure: run again with what is held, or be marked as left paused.

        Raises:
            Dirty: ranks hold different versions.
        """
        status = self.status()
        self._rpc("weightwire_end", left_paused=is_ours and status.is_mixture)
        if is_ours:
            self._resume(status)

    def _resume(self, status: ServerStatus) -> None:
        """Let it run again, unless ranks hold different versions.

        Raises:
            Dirty: they do; the server stays paused.
        """
        if status.is_mixture:
            raise Dirty(f"{self.url} was left paused: {status.held}; update it again")
        if status.version >= 0:
            self._calls.post("/update_weight_version", {"new_version": str(status.version)})
        self._calls.post("/resume")

    def _tell(self, path: str, body: Mapping[str, Any] | None = None) -> None:
        """A call into every rank; if it fails, say it as the rank did.

        Raises:
            WeightwireError: of the rank's own class.
        """
        try:
            self._calls.post(path, body)
        except EngineRefused as error:
            for rank in self.status().ranks:
                if rank.failure is not None:
                    raise rank.failure.as_error() from error
            raise

    def _rpc(self, method: str, **arguments: object) -> ServerStatus:
        """One of the worker extension's methods, on every rank, for its status."""
        return ServerStatus(tuple(parse_status(each) for each in self._ask(method, **arguments)))

    def _ask(self, method: str, **arguments: object) -> list[Any]:
        texts = {name: str(value) for name, value in arguments.items()}
        answer = self._calls.post("/collective_rpc", {"method": method, "kwargs": texts})
        found: list[Any] = answer["results"]
        return found
