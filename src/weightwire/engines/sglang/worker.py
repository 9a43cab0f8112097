"""What runs in every tensor-parallel worker of SGLang: the loader, and a thread beside it.

``load`` is called between two forward passes, on the thread that runs them. An exception in it
would end SGLang's scheduler, and with it the server. So it never raises: what went wrong is told
in the mailbox, where the client looks before it lets the server go on.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from weightwire.apply.layouts.target import LayoutTarget
from weightwire.engines.remote.failures import Failure, failure_of
from weightwire.engines.remote.receiver import RankReceiver
from weightwire.engines.remote.status import RankStatus
from weightwire.engines.sglang.command import Command, command_in
from weightwire.engines.sglang.mailbox import Mailbox
from weightwire.errors import EngineRefused
from weightwire.store.open import open_store
from weightwire.store.receipts import default_worker
from weightwire.subscriber import Subscriber

log = logging.getLogger("weightwire.sglang")

_LOOK_S = 0.02
"""How often the thread looks into the mailbox: a read of one small file."""


def load(model: Any, named_tensors: Iterable[tuple[str, Any]]) -> None:
    """SGLang's custom weight loader: does what the command among the tensors says. Never raises."""
    try:
        command = command_in(named_tensors)
    except EngineRefused as error:
        log.error("%s", error)
        return
    try:
        _do(model, command)
    except Exception as error:  # raising would end the server
        log.exception("%s of version %d failed", command.do, command.version)
        _tell(model, command, error)


class RankWorker:
    """One rank: a receiver, and the thread that stages what the mailbox asks for."""

    def __init__(self, model: Any, command: Command) -> None:
        """Open the run.

        Raises:
            NotARun, StoreUnavailable, StoreRefused: as ``Subscriber``.
        """
        self._command = command
        self._mailbox = Mailbox(command.mailbox)
        target = LayoutTarget(model.load_weights, model.named_parameters)
        self._receiver = RankReceiver(_subscriber(target, command), target)
        self._refused: Failure | None = None
        self._said: tuple[RankStatus, int] | None = None
        self._turn = 0
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._receiver.begin_poll().result()
        self.tell()
        threading.Thread(target=self._watch, name="weightwire-mail", daemon=True).start()

    def activate(self, version: int) -> None:
        """Write a staged version; nothing is written by a rank that has not staged it.

        Raises:
            EngineRefused: it is not staged.
        """
        self._receiver.activate(version)
        self.tell()

    def tell(self, refused: Failure | None = None) -> None:
        """Write where this rank stands, if that changed."""
        with self._lock:
            self._refused = refused
            status = replace(
                self._receiver.status(),
                rank=self._command.rank,
                n_ranks=self._command.n_ranks,
                store=self._command.store,
                refused=refused,
            )
            if (status, self._turn) != self._said:
                self._mailbox.report(status, self._turn)
                self._said = status, self._turn

    def close(self) -> None:
        """Follow no more; the weights stay as they are."""
        self._stop.set()
        self._receiver.close()

    def _watch(self) -> None:
        while not self._stop.is_set() and self._mailbox.is_there:
            version, turn = self._mailbox.wanted()
            if turn > self._turn:
                self._refused = None
                self._receiver.begin_staging(version)
                self._turn = turn
            self.tell(self._refused)
            self._stop.wait(_LOOK_S)


_workers: weakref.WeakKeyDictionary[Any, RankWorker] = weakref.WeakKeyDictionary()
"""By model: a process may serve two, one of them a draft."""


def _do(model: Any, command: Command) -> None:
    if command.do == "connect":
        before = _workers.pop(model, None)
        if before is not None:
            before.close()
        _workers[model] = RankWorker(model, command)
        return
    if model not in _workers:
        raise EngineRefused("this rank follows no run; connect it first")
    _workers[model].activate(command.version)


def _tell(model: Any, command: Command, error: Exception) -> None:
    """What went wrong, where the client looks for it."""
    failure = failure_of(error)
    if command.do == "activate" and model in _workers:
        _workers[model].tell(refused=failure)
        return
    status = RankStatus(command.rank, command.n_ranks, "", "empty", refused=failure)
    if command.mailbox:
        Mailbox(command.mailbox).report(status, turn=0)


def _subscriber(target: LayoutTarget, command: Command) -> Subscriber:
    store: Any = command.store
    if command.options:
        store = open_store(store, options=dict(command.options))
    return Subscriber(
        store,
        target,
        key=command.key,
        worker=f"{command.worker or default_worker()}-rank{command.rank}",
        cache=Path(command.cache) / f"rank{command.rank}" if command.cache else None,
    )
