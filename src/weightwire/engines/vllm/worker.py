"""What is called in every rank while it serves: ``--worker-extension-cls`` takes this class.

vLLM mixes it into its worker; ``collective_rpc`` calls a method in every rank, between two steps
of the model. So each must be quick, and none may raise (see ``ranks``): what goes wrong is in the
answer. Over HTTP vLLM passes strings only, hence the conversions.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from weightwire.engines.remote.failures import Failure, failure_of
from weightwire.engines.remote.status import RankStatus, Session
from weightwire.errors import EngineRefused, EngineUnavailable

if TYPE_CHECKING:
    from weightwire.engines.vllm.engine import WeightwireEngine

_LONG_AGO_S = 1e9
"""JSON has no infinity."""


class WeightwireWorker:
    """Staging, status and abort, beside vLLM's own weight-update calls."""

    _weightwire_session: Session | None = None
    """The activation under way, so that whoever finds its client dead can end it."""

    def weightwire_stage(self, version: int | str) -> dict[str, Any]:
        """Begin to stage a version in the background."""
        return self._weightwire_do(lambda engine: engine.begin_staging(int(version)))

    def weightwire_status(self) -> dict[str, Any]:
        """Where this rank stands."""
        return self._weightwire_do(lambda _: None)

    def weightwire_poll(self) -> dict[str, Any]:
        """Begin to look for the newest version in the background."""
        return self._weightwire_do(lambda engine: engine.receiver.begin_poll())

    def weightwire_begin(
        self, version: int | str, was_paused: bool | str, takeover_s: float | str
    ) -> dict[str, Any]:
        """An activation follows: refuse it if it could not work, and leave no earlier one open.

        ``takeover_s``: an activation that was begun so long ago is not waited for any more.
        """

        def begin(engine: WeightwireEngine) -> None:
            if engine.is_asleep():
                raise EngineRefused("the engine is asleep: wake it, then activate")
            engine.receiver.require_staged(int(version))
            self._weightwire_take_over(float(takeover_s))
            paused = str(was_paused).lower() == "true"
            self._weightwire_session = Session(int(version), paused, time.monotonic())

        return self._weightwire_do(begin)

    def weightwire_end(self, left_paused: bool | str = False) -> dict[str, Any]:
        """The activation is over; with ``left_paused`` the server waits for the next to resume it."""

        def end(engine: WeightwireEngine) -> None:
            self._weightwire_close_update()
            engine.receiver.end_pause()
            session, is_left = self._weightwire_session, str(left_paused).lower() == "true"
            left = replace(session, began_s=-_LONG_AGO_S) if session and is_left else None
            self._weightwire_session = left

        return self._weightwire_do(end)

    def weightwire_begin_proof(self) -> dict[str, Any]:
        """Begin to read all of live memory, for ``weightwire_proof``."""
        return self._weightwire_do(lambda engine: engine.receiver.begin_proof())

    def weightwire_proof(self) -> dict[str, Any]:
        """This rank's part of a proof, under ``proof``; absent while it is being made."""
        found: list[dict[str, Any]] = []

        def fetch(engine: WeightwireEngine) -> None:
            proof = engine.receiver.proof()
            found.extend([proof.as_json()] if proof else [])

        status = self._weightwire_do(fetch)
        return {**status, "proof": found[0]} if found else status

    def weightwire_abort(self) -> dict[str, Any]:
        """Forget what is staged, from whatever state; the server goes on with what it serves."""

        def abort(engine: WeightwireEngine) -> None:
            self._weightwire_close_update()
            self._weightwire_session = None
            engine.receiver.abort()

        return self._weightwire_do(abort)

    def _weightwire_take_over(self, takeover_s: float) -> None:
        """A client that died between start and finish must not lock out every later one.

        Raises:
            EngineUnavailable: another one seems to be alive.
        """
        found = self._weightwire_session
        age_s = time.monotonic() - found.began_s if found else takeover_s
        if found is not None and age_s < takeover_s:
            raise EngineUnavailable(
                f"another client began to activate version {found.version} {age_s:.0f} s ago;"
                f" if it died, try again in {takeover_s - age_s:.0f} s"
            )
        self._weightwire_close_update()

    def _weightwire_close_update(self) -> None:
        """vLLM closes an update that failed only in the rank that raised."""
        self._weight_update_active = False

    def _weightwire_do(self, work: Any) -> dict[str, Any]:
        """Do it, and say where this rank stands then; a failure of this call stands beside."""
        engine: Any = getattr(self, "weight_transfer_engine", None)
        if not hasattr(engine, "begin_staging"):
            return _not_set_up(type(engine).__name__)
        engine.is_asleep = self._weightwire_is_asleep
        engine.close_update = self._weightwire_close_update
        refused = None
        try:
            work(engine)
        except Exception as error:
            refused = failure_of(error)
        status: RankStatus = replace(
            engine.status(), session=self._weightwire_session, refused=refused
        )
        return status.as_json()

    def _weightwire_is_asleep(self) -> bool:
        """Whether the weights are out of memory. CPUs cannot sleep."""
        backend = getattr(self, "_sleep_mode_backend", None)
        return backend is not None and backend.state() != "RUNNING"


def _not_set_up(found: str) -> dict[str, Any]:
    """The answer of a server that was started with another backend."""
    message = f"the weight-transfer engine is {found}; start vLLM with backend 'weightwire'"
    refused = Failure("EngineRefused", message)
    return RankStatus(rank=0, n_ranks=1, store="", state="unconnected", refused=refused).as_json()
