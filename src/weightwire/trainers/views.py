"""One training run in several precisions: each view is a run of its own, in step with the main one.

Receivers of another precision follow ``STORE/views/NAME`` like any run. A view has its own baseline,
anchors and patches. What fails in one view stays in that view, and its next publish covers it.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

from weightwire.diff.cast import cast
from weightwire.diff.fp8 import fp8
from weightwire.diff.memory import State
from weightwire.diff.state import DerivedState
from weightwire.errors import RetryError, StopError, WeightwireError
from weightwire.events import Published
from weightwire.publisher import Publisher
from weightwire.workers import failed

log = logging.getLogger("weightwire.publisher")

View: TypeAlias = str | Callable[[State], DerivedState]
"""``bf16``, ``fp16``, ``fp8``, or a function from the state to what the view's receivers get."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True)
class PublishedViews:
    """The futures of one publish."""

    main: Future[Published]
    views: Mapping[str, Future[Published]]

    def result(self) -> Published:
        """Wait for the main run's version.

        Raises:
            WeightwireError: what it failed with; a view's failure is in that view's future.
        """
        return self.main.result()


class ViewPublisher:
    """Publishes a state, and views of it, with one call; a context manager."""

    def __init__(
        self,
        store: str | os.PathLike[str],
        state: State,
        *,
        views: Mapping[str, View],
        **options: Any,
    ) -> None:
        """Open the main run and one run for each view; ``options`` are those of ``Publisher``.

        ``overlap`` and ``baseline`` are the main run's alone.

        Raises:
            StopError: a view's name or kind that cannot work.
            StoreUnavailable, StoreRefused: the store's own errors.
        """
        states = {name: _maker(name, view)(state) for name, view in views.items()}
        shared = {name: each for name, each in options.items() if name not in _MAIN_ONLY}
        self._main = Publisher(store, state, **options)
        self._views = {
            name: Publisher(view_address(store, name), view, **shared)
            for name, view in states.items()
        }

    @property
    def version(self) -> int:
        """The main run's newest version."""
        return self._main.version

    def publish(self, *, step: int | None = None) -> PublishedViews:
        """Publish all of them; returns when the state has been read for each.

        Every view's commit carries ``step``, so that a receiver knows what it holds. Without one it
        is the main run's version, which must then be committed first: give a step to avoid the wait.

        Raises:
            FencedWriter, PublisherClosed, StopError: the main run's.
        """
        main = self._main.publish(step=step)
        self._main.wait_until_read()
        if step is None:
            try:
                step = max(main.result().version, 0)
            except RetryError as error:
                # Nothing to be in step with; the next publish covers all of them.
                return PublishedViews(main, {name: failed(error) for name in self._views})
        views = {name: _try(name, each, step) for name, each in self._views.items()}
        return PublishedViews(main, views)

    def wait(self) -> None:
        """Wait for everything under way.

        Raises:
            WeightwireError: what the main run's last publish failed with.
        """
        for name, view in self._views.items():
            try:
                view.wait()
            except WeightwireError as error:
                log.warning("view %r: %s", name, error)
        self._main.wait()

    def close(self) -> None:
        """Finish what is under way in all of them."""
        for publisher in (self._main, *self._views.values()):
            publisher.close()

    def __enter__(self) -> ViewPublisher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_MAIN_ONLY = frozenset({"overlap", "baseline", "on_published"})


def view_address(store: str | os.PathLike[str], name: str) -> str:
    """Where the receivers of a view find it."""
    return f"{os.fspath(store).rstrip('/')}/views/{name}"


def _maker(name: str, view: View) -> Callable[[State], DerivedState]:
    if not _NAME.fullmatch(name):
        raise StopError(f"a view cannot be called {name!r:.80}: use letters, digits, dot and dash")
    if callable(view):
        return view
    return fp8 if view == "fp8" else partial(cast, dtype=view)


def _try(name: str, view: Publisher, step: int) -> Future[Published]:
    """A view that fails holds nobody up."""
    try:
        return view.publish(step=step)
    except WeightwireError as error:
        log.error("view %r was not published: %s", name, error)
        return failed(error)
