"""The trainer's side of a sync: a patch of what changed, or a whole file every time."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

import weightwire as ww
from weightwire.clock import Clock
from weightwire.demo.changes import ChangeCounter, Changed
from weightwire.demo.events import Sent
from weightwire.demo.settings import Arm, Settings
from weightwire.store.retry import RetryingStore, RetryPolicy


def whole_key(version: int) -> str:
    """Where a version lies when versions are whole files."""
    return f"{version:06d}.safetensors"


@dataclass(frozen=True)
class _Witness:
    """What the trainer knows of a version without asking the library that sent it."""

    digest: str
    changed: Changed


class Sender(Protocol):
    """Makes versions of the trainer's weights exist, one after another."""

    def send(self, step: int) -> None:
        """The weights as they are now; training may go on when it returns."""

    def close(self) -> None:
        """Wait for what is under way."""


class PatchSender:
    """Through ``weightwire.Publisher``: training waits for reading, not for the store."""

    def __init__(self, settings: Settings, module: Any, say: Callable[[Sent], None]) -> None:
        self._state = ww.cast(module, "bf16")
        self._counter = ChangeCounter(module)
        self._say = say
        self._last: Future[ww.Published] | None = None
        self._publisher = ww.Publisher(
            settings.open("patches", for_worker=False),
            self._state,
            n_threads=settings.trainer_threads,
        )

    def send(self, step: int) -> None:
        """Publish the next version.

        Raises:
            WeightwireError: this version or the one before did not come to be.
        """
        if self._last is not None:
            self._last.result()
        self._last = self._publisher.publish(step=step)
        witness = _Witness(ww.digest(self._state), self._counter.count())
        self._last.add_done_callback(lambda future: self._tell(future, witness))

    def close(self) -> None:
        """Wait for the last version.

        Raises:
            WeightwireError: it did not come to be.
        """
        try:
            if self._last is not None:
                self._last.result()
        finally:
            self._publisher.close()

    def _tell(self, future: Future[ww.Published], witness: _Witness) -> None:
        if future.exception() is None:
            self._say(_sent(future.result(), witness))


class WholeSender:
    """A plain safetensors file per version: what most trainers do today."""

    def __init__(
        self, settings: Settings, module: Any, say: Callable[[Sent], None], clock: Clock
    ) -> None:
        self._module, self._say, self._clock = module, say, clock
        self._counter = ChangeCounter(module)
        store = settings.open("full", for_worker=False)
        self._store = RetryingStore(store, clock, RetryPolicy())

    def send(self, step: int) -> None:
        """Upload the next version; training waits for it.

        Raises:
            StoreUnavailable, StoreRefused: the store's own errors.
        """
        import torch
        from safetensors.torch import save

        began = self._clock.monotonic()
        tensors = {n: p.detach().to(torch.bfloat16) for n, p in self._module.named_parameters()}
        data = save(tensors)
        read = self._clock.monotonic()
        self._store.put(whole_key(step), data)
        written = self._clock.monotonic()
        changed = self._counter.count()
        published = ww.Published(
            version=step,
            epoch=1,
            digest=ww.digest(tensors),
            n_elements=changed.n_elements,
            n_changed=changed.n_changed,
            n_bytes=len(data),
            n_state_bytes=2 * changed.n_elements,
            read_s=read - began,
            commit_s=written - read,
        )
        witness = _Witness(ww.digest(ww.cast(self._module, "bf16")), changed)
        self._say(_sent(published, witness, arm="full"))

    def close(self) -> None:
        """Nothing is under way."""


def open_sender(
    settings: Settings, arm: Arm, module: Any, say: Callable[[Sent], None], clock: Clock
) -> Sender:
    """The sender of one arm.

    Raises:
        StoreUnavailable, StoreRefused: the store's own errors.
    """
    if arm == "patches":
        return PatchSender(settings, module, say)
    return WholeSender(settings, module, say, clock)


def _sent(published: ww.Published, witness: _Witness, arm: Arm = "patches") -> Sent:
    return Sent(
        arm=arm,
        version=published.version,
        digest=published.digest,
        trainer_digest=witness.digest,
        n_elements=published.n_elements,
        n_changed=published.n_changed,
        n_counted=witness.changed.n_changed,
        n_bytes=published.n_bytes,
        n_full_bytes=published.n_state_bytes,
        read_s=published.read_s,
        commit_s=published.commit_s,
        changed_by_tensor=witness.changed.shares,
    )
