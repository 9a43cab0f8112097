"""``weightwire follow``: a local checkpoint folder that is always the newest version."""

from __future__ import annotations

import hashlib
import logging
import platform
import re
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer

from weightwire.cli.event_sinks import MetricsFile, MetricsPort, open_sinks
from weightwire.cli.follow_target import CarefulFolder
from weightwire.cli.follow_view import View, choose_view
from weightwire.cli.options import PinnedKey, StoreIn
from weightwire.cli.quantities import duration
from weightwire.cli.signals import Signals
from weightwire.cli.terminal import open_terminal, settings_of, warnings_as_notes
from weightwire.clock import Clock, SystemClock
from weightwire.errors import NotARun, StopError, WeightwireError
from weightwire.events import Updated
from weightwire.store.counting import CountingStore
from weightwire.store.open import open_store
from weightwire.store.run import find_identity
from weightwire.subscriber import Polling, Subscriber
from weightwire.trust.keys import PublicKey

log = logging.getLogger("weightwire.follow")

_LOOK_S = 1.0
"""How long to watch before looking whether there is something else to do."""


def follow_command(
    context: typer.Context,
    store: StoreIn,
    output: Annotated[
        Path,
        typer.Option("--output", "-o", metavar="DIR", help="Checkpoint folder to keep current."),
    ],
    until: Annotated[
        int | None, typer.Option("--until", min=0, metavar="N", help="Stop at version N or later.")
    ] = None,
    once: Annotated[
        bool, typer.Option("--once", help="Bring it to the newest version, then stop.")
    ] = False,
    key: PinnedKey = None,
    worker: Annotated[
        str | None, typer.Option("--worker", metavar="NAME", help="Name on the receipts.")
    ] = None,
    cache: Annotated[
        Path | None,
        typer.Option("--cache", metavar="DIR", help="Keep downloads and the newest version seen."),
    ] = None,
    poll: Annotated[
        float,
        typer.Option("--poll", parser=duration, metavar="S", help="Longest pause between looks."),
    ] = "5s",  # type: ignore[assignment]
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a checkpoint that is not of this run.")
    ] = False,
    metrics_port: MetricsPort = None,
    metrics_file: MetricsFile = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object per version, one per line.")
    ] = False,
) -> None:
    """Keep DIR at the newest version of the run in STORE, proven bit for bit.

    Waits for the run if there is none yet, and goes on after outages of the store. A process that
    was killed is simply started again. Ends on SIGTERM with 0 and on Ctrl-C with 130; an
    overwrite that has begun is finished first.
    """
    with open_terminal(context, as_json=as_json) as terminal, ExitStack() as stack:
        view = stack.enter_context(choose_view(terminal, quiet=settings_of(context).quiet))
        stack.enter_context(warnings_as_notes(context, view.note))
        signals = stack.enter_context(Signals())
        follower = _Follower(store, view, signals, poll_s=poll)
        stack.callback(follower.close)
        sink = stack.enter_context(
            open_sinks(
                follower.store,
                metrics_file,
                metrics_port,
                n_heals=lambda: follower.n_heals,
                note=view.note,
            )
        )
        if not once:
            follower.wait_for_run()
        follower.begin(
            CarefulFolder(output, signals, lambda: follower.version, may_replace=overwrite),
            key=PublicKey.parse(key) if key else None,
            worker=worker or _worker_of(output),
            cache=cache,
            on_updated=sink,
        )
        follower.catch_up() if once else follower.follow(until)


class _Follower:
    """A subscriber that waits, goes on after trouble, and shows what it does."""

    def __init__(
        self,
        store: str,
        view: View,
        signals: Signals,
        *,
        poll_s: float,
        clock: Clock | None = None,
    ) -> None:
        self.store = CountingStore(open_store(store))
        self._view, self._signals, self._poll_s = view, signals, poll_s
        self._clock = clock or SystemClock()
        self._subscriber: Subscriber | None = None
        self._trouble = ""
        self._has_shown = False

    @property
    def version(self) -> int:
        """What the folder is known to hold; -1 if nothing."""
        return self._subscriber.version if self._subscriber else -1

    @property
    def n_heals(self) -> int:
        """How often damage was found and repaired."""
        return self._subscriber.n_heals if self._subscriber else 0

    def wait_for_run(self) -> None:
        """Until something was published there; an outage is waited for too.

        Raises:
            StopError: something else stands in its place, or the store refuses.
        """
        has_said = False
        while not self._is_there():
            if not has_said and not self._trouble:
                self._view.note("nothing was published there yet: waiting")
                has_said = True
            self._pause()

    def begin(self, target: CarefulFolder, **options: Any) -> None:
        """Open the run.

        Raises:
            NotARun: nothing was published there.
            RetryError: the store gave no answer.
        """
        polling = Polling(first_s=min(Polling.first_s, self._poll_s), max_s=self._poll_s)
        self._subscriber = Subscriber(
            self.store, target, polling=polling, progress=self._view.fetched, **options
        )

    def catch_up(self) -> None:
        """The newest version, once.

        Raises:
            NotARun: there is no version yet.
            WeightwireError: whatever ``Subscriber.update`` raises.
        """
        subscriber = self._require()
        updated = subscriber.update()
        if updated is None and subscriber.version < 0:
            raise NotARun("the run was begun, and no version was published yet: try again later")
        self._show(updated or _held_already(subscriber))

    def follow(self, until: int | None) -> None:
        """Every version as it comes, up to ``until`` or for ever.

        Raises:
            StopError: what trying again cannot help.
        """
        while until is None or self.version < until:
            updated = self._try_to_update()
            if updated is not None:
                self._show(updated)
            elif self.version >= 0 and not self._has_shown:
                self._show(_held_already(self._require()))
            self._signals.check()

    def close(self) -> None:
        """Let go of files and threads."""
        if self._subscriber is not None:
            self._subscriber.close()

    def _is_there(self) -> bool:
        try:
            found = find_identity(self.store) is not None
        except StopError:
            raise
        except WeightwireError as error:
            self._say_trouble(error)
            return False
        self._say_well()
        return found

    def _try_to_update(self) -> Updated | None:
        subscriber = self._require()
        try:
            updated = subscriber.update() if subscriber.watch(timeout_s=_LOOK_S) else None
        except StopError:
            raise
        except WeightwireError as error:
            self._say_trouble(error)
            self._pause()
            return None
        self._say_well()
        return updated

    def _say_trouble(self, error: WeightwireError) -> None:
        """Once per kind of trouble: an outage of hours must not fill a log."""
        if type(error).__name__ != self._trouble:
            self._trouble = type(error).__name__
            log.warning("not updated, trying again: %s", error)

    def _say_well(self) -> None:
        if self._trouble:
            self._trouble = ""
            self._view.note("going on")

    def _pause(self) -> None:
        self._clock.sleep(self._poll_s * (0.5 + 0.5 * self._clock.jitter()))

    def _show(self, updated: Updated) -> None:
        self._has_shown = True
        self._view.updated(updated, self.n_heals)

    def _require(self) -> Subscriber:
        if self._subscriber is None:
            raise StopError("begin() comes first")
        return self._subscriber


def _worker_of(output: Path) -> str:
    """The same name after a restart: a second receipt would hold old versions back."""
    host = re.sub(r"[^A-Za-z0-9._-]", "-", platform.node()).lstrip("._-") or "worker"
    return f"{host[:64]}-{hashlib.sha256(str(output.resolve()).encode()).hexdigest()[:8]}"


def _held_already(subscriber: Subscriber) -> Updated:
    return Updated(
        version=subscriber.version,
        previous=subscriber.version,
        digest=subscriber.digest,
        n_bytes=0,
        n_changed=0,
        n_steps=0,
        lag=0,
        was_whole=False,
        n_detours=0,
        stage_s=0.0,
        fetch_s=0.0,
        activate_s=0.0,
        verify_s=0.0,
    )
