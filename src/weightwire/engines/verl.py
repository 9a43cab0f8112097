"""verl's checkpoint engine ``weightwire``: patches on the wire, whole tensors for verl's loaders.

    actor_rollout_ref.rollout.checkpoint_engine.backend=weightwire
    actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=weightwire.engines.verl
    +actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.weightwire.store=s3://bucket/run-7

verl imports this module in every worker process, then makes one engine in each:

    trainer ranks   send_weights     all of them gather, as verl has it; the first one publishes
    rollout ranks   receive_weights  a copy of the weights on the host is brought to that version
                                     by patches; its tensors are handed to verl's own loader

verl pauses generation before it asks for either, so publishing, fetching and loading all lie
within its pause. What shrinks is what crosses the network.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

from weightwire.clock import Clock, SystemClock
from weightwire.diff.cast import cast
from weightwire.engines.module_target import tensors_of_state
from weightwire.errors import ExtraMissing, NoWay, StopError, StoreUnavailable
from weightwire.events import Published
from weightwire.publisher import Publisher
from weightwire.subscriber import Polling, Subscriber
from weightwire.trust.keys import SigningKey

try:
    from verl.checkpoint_engine.base import CheckpointEngineRegistry, CheckpointEngineWithCache
except ImportError as _error:
    raise ExtraMissing("verl is not installed, or lacks a part: pip install verl") from _error

log = logging.getLogger("weightwire.engines")

BACKEND = "weightwire"
"""``checkpoint_engine.backend``"""
_POLLING = Polling(first_s=0.02, max_s=0.5)


@CheckpointEngineRegistry.register(BACKEND)
class WeightwireCheckpointEngine(CheckpointEngineWithCache):  # type: ignore[misc]
    """One worker's end: a publisher in the first trainer rank, a subscriber in every rollout rank.

    Both outlive a sync: the publisher's baseline and the receiver's copy are what patches need.
    """

    wire_format = "named_tensors"

    def __init__(
        self,
        bucket_size: int,
        is_master: bool = False,
        *,
        store: str,
        dtype: str | None = "bf16",
        device: str | None = None,
        key: str | None = None,
        public_key: str | None = None,
        timeout_s: float = 1800.0,
        publisher: dict[str, Any] | None = None,
        subscriber: dict[str, Any] | None = None,
    ) -> None:
        """Nothing is opened yet; verl makes engines before there is a model.

        Args:
            bucket_size: verl's; receivers' buckets are verl's own affair.
            is_master: the first trainer rank, which publishes.
            store: the run, reachable from every node.
            dtype: what wide floats are published as; None for what verl gives.
            device: where received tensors are given to the loader; None for verl's own.
            key: path of the run's signing key; only trainers need it.
            public_key: follow only what it signed.
            timeout_s: how long a rollout rank waits for a version before it gives up.
            publisher, subscriber: further options of ``Publisher`` and ``Subscriber``.
        """
        del bucket_size
        self._is_master, self._store, self._dtype, self._device = is_master, store, dtype, device
        self._key, self._public_key, self._timeout_s = key, public_key, timeout_s
        self._publisher_options = dict(publisher or {})
        self._subscriber_options = {"polling": _POLLING, **(subscriber or {})}
        self._host: dict[str, Any] = {}
        """The trainer's weights, gathered, in host memory; used again at every sync."""
        self._publisher: Publisher | None = None
        self._mirror: dict[str, Any] = {}
        """The receiver's copy, which patches are applied to."""
        self._subscriber: Subscriber | None = None
        self._wanted = 0
        self._clock: Clock = SystemClock()

    @property
    def version(self) -> int:
        """The version last published here, or held here; -1 before the first."""
        end = self._publisher or self._subscriber
        return end.version if end is not None else -1

    def prepare(self) -> dict[str, Any]:
        """Say which version the next one follows; only the publisher knows.

        Raises:
            the same as ``Publisher``.
        """
        if not self._is_master:
            return {}
        return {"version": self._open_publisher().version}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Nobody is connected to anybody: rollout ranks are told the version to wait for.

        Raises:
            StopError: no trainer rank was the master.
        """
        known = [each["version"] for each in metadata[:actor_wg_world_size] if "version" in each]
        if len(known) != 1:
            raise StopError(f"{len(known)} trainer ranks publish; exactly one must be the master")
        return (
            {"version": [known[0] + 1] * actor_wg_world_size},
            {"version": [known[0] + 1] * rollout_world_size},
        )

    def init_process_group(self, version: int) -> None:
        """Take note of the version that comes."""
        self._wanted = version

    def finalize(self) -> None:
        """Nothing to free: what is kept is what the next patch starts from."""

    async def send_weights(
        self, weights: Any, global_steps: int | None = None
    ) -> dict[str, float] | None:
        """Publish what verl gathers; gives numbers for verl's log on the rank that did.

        Raises:
            WeightwireError: nothing was published; the next sync covers it.
        """
        names = set()
        async for name, tensor in _pairs(weights):
            # Every rank must go through all of them: gathering a tensor takes them all.
            if self._is_master:
                self._keep(name, tensor)
                names.add(name)
        for name in self._host.keys() - names:
            del self._host[name]
        if not self._is_master:
            return None
        return _numbers(await asyncio.to_thread(self._publish, global_steps))

    async def receive_weights(
        self, global_steps: int | None = None
    ) -> AsyncIterator[tuple[str, Any]]:
        """Bring the host's copy to the version that was announced, then give all of it.

        Raises:
            NoWay: it did not come within ``timeout_s``.
            WeightwireError: as ``Subscriber.update``.
        """
        del global_steps
        await asyncio.to_thread(self._update, self._wanted)
        async for pair in self.get_weights():
            yield pair

    async def get_weights(self) -> AsyncIterator[tuple[str, Any]]:
        """What is held now, tensor by tensor, on the loader's device."""
        device = self._device or _verl_device()
        for name, tensor in tensors_of_state(self._mirror):
            yield name, tensor.to(device)

    def close(self) -> None:
        """Finish what is under way and let go of threads."""
        for end in (self._publisher, self._subscriber):
            if end is not None:
                end.close()

    def _keep(self, name: str, tensor: Any) -> None:
        """Copy to the host: verl gives device memory that is gone, or used again, at the next one."""
        room = self._host.get(name)
        if room is None or room.shape != tensor.shape or room.dtype != tensor.dtype:
            self._host[name] = tensor.detach().to("cpu", copy=True)
        else:
            room.copy_(tensor.detach())

    def _open_publisher(self) -> Publisher:
        if self._publisher is None:
            state = cast(self._host, self._dtype) if self._dtype else self._host
            key = SigningKey.load(self._key) if self._key else None
            self._publisher = Publisher(self._store, state, key=key, **self._publisher_options)
        return self._publisher

    def _publish(self, step: int | None) -> Published:
        publisher = self._open_publisher()
        try:
            return publisher.publish(step=step).result()
        except BaseException:
            # Whether that version exists may be unknown, and receivers are told numbers: the next
            # sync opens the run anew, which finds out.
            self._publisher = None
            publisher.close()
            raise

    def _update(self, version: int) -> None:
        subscriber = self._subscriber = self._subscriber or self._open_subscriber()
        deadline = self._clock.monotonic() + self._timeout_s
        while subscriber.version < version or subscriber.is_dirty:
            if not subscriber.watch(timeout_s=max(deadline - self._clock.monotonic(), 0.0)):
                raise NoWay(
                    f"{self._store}: version {version} did not come in {self._timeout_s:.0f} s;"
                    " see the trainer's log"
                )
            try:
                subscriber.update()
            except StoreUnavailable as error:
                log.warning("not updated, trying again: %s", error)

    def _open_subscriber(self) -> Subscriber:
        return Subscriber(
            self._store, self._mirror, key=self._public_key, **self._subscriber_options
        )


async def _pairs(weights: Any) -> AsyncIterator[tuple[str, Any]]:
    """verl's generators come in both kinds."""
    if hasattr(weights, "__aiter__"):
        async for pair in weights:
            yield pair
        return
    for pair in weights:
        yield pair


def _numbers(published: Published) -> dict[str, float]:
    return {
        "weightwire/version": published.version,
        "weightwire/changed": published.density,
        "weightwire/patch_bytes": published.n_bytes,
        "weightwire/full_bytes": published.n_state_bytes,
        "weightwire/publish_s": published.read_s + published.commit_s,
    }


def _verl_device() -> str:
    """What verl loads to; it names a device even where there is none."""
    import torch
    from verl.utils.device import get_device_name

    name = str(get_device_name())
    module = getattr(torch, name, None)
    return name if module is not None and module.is_available() else "cpu"
