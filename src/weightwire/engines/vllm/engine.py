"""The weight-transfer engine that vLLM makes in every rank.

vLLM's own calls do all that is needed: ``init_weight_transfer_engine`` with a store, then
``update_weights`` with a version. What was not staged before, with ``worker.py``, is staged then,
in the pause.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from weightwire.apply.layouts.target import LayoutTarget
from weightwire.engines.remote.failures import Failure
from weightwire.engines.remote.receiver import AfterPause, RankReceiver, unpinned_processors
from weightwire.engines.remote.status import RankStatus
from weightwire.engines.vllm.ranks import Ranks, VllmRanks, together
from weightwire.errors import EngineRefused
from weightwire.store.open import open_store
from weightwire.store.receipts import default_worker
from weightwire.store.retry import RetryPolicy
from weightwire.subscriber import Subscriber
from weightwire.workers import threads

Info = TypeVar("Info")


@dataclass
class InitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """Which run to follow."""

    store: str
    key: str | None = None
    """Follow only what this public key signed."""
    worker: str | None = None
    """The name on the receipts; the rank is added."""
    cache: str | None = None
    """A folder, shared by all ranks of a host, that saves a restarted server the download."""
    load: bool = True
    """Bring the weights to the newest version at once; the server must not be generating."""
    options: Mapping[str, str] = field(default_factory=dict)
    """For the store, over what the server's environment says: endpoint, region …"""
    retry_s: float | None = None
    """Give a store that does not answer so long before staging fails."""
    connection: str = ""
    """Chosen by the client, and given back in every status."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Which version to serve from now on."""

    version: int

    def __post_init__(self) -> None:
        """A number in a string will do."""
        self.version = int(self.version)


class WeightwireEngine(WeightTransferEngine[InitInfo, UpdateInfo]):  # type: ignore[misc]
    """Brings one rank's live weights from version to version; see ``ranks`` for who may raise."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """As vLLM makes it: (config, vllm_config, device, model).

        Raises:
            EngineRefused: a vLLM whose engines are not given the model.
        """
        _require_model(super().__init__)
        super().__init__(*args, **kwargs)
        self._ranks: Ranks = VllmRanks()
        self._receiver: RankReceiver | None = None
        self._failure: Failure | None = None
        self._store = self._connection = ""
        self.is_asleep: Callable[[], bool] = lambda: False
        """Whether the weights are out of memory; the worker knows, and puts it here."""
        self.close_update: Callable[[], None] = lambda: None
        """Ends vLLM's update where this rank does not raise; the worker puts it here."""

    @property
    def receiver(self) -> RankReceiver:
        """What follows the run.

        Raises:
            EngineRefused: no run was given yet.
        """
        if self._receiver is None:
            raise EngineRefused("not connected to a run: init_weight_transfer_engine comes first")
        return self._receiver

    def parse_init_info(self, init_dict: dict[str, Any]) -> Any:
        """As it came: what is wrong with it, the ranks must find out together."""
        return init_dict

    def init_transfer_engine(self, init_info: InitInfo | dict[str, Any]) -> None:
        """Open the run; load the newest version if asked to.

        May be called again, for another run.

        Raises:
            NotARun, StoreUnavailable, StoreRefused: the store's own errors.
            UnsupportedLayout: a model that cannot be patched in place; names the parameter.
            EngineRefused: an init_info that is none.
        """
        found: list[InitInfo] = []
        if self._together(lambda: found.append(_parsed(InitInfo, init_info))) and self._together(
            lambda: self._connect(found[0])
        ):
            self._load_newest(found[0])

    def start_weight_update(self) -> None:
        """Nothing yet, and nothing that could fail: a start that only some ranks make has no end."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """As vLLM's own, but the ranks find out together what is wrong with ``update_info``.

        Raises:
            WeightwireError: as ``receive_weights``.
        """
        found: list[UpdateInfo] = []
        if self._together(lambda: found.append(_parsed(UpdateInfo, update_info))):
            self.receive_weights(found[0])
        if self._failure is not None:
            self.close_update()
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Write a version: staged before, or now. On all ranks or on none.

        Raises:
            WeightwireError: as ``Subscriber.stage`` and ``activate``.
        """
        version = update_info.version
        if self._together(lambda: self._ready(version)):
            self._together(lambda: self.receiver.activate(version))

    def begin_staging(self, version: int) -> None:
        """Stage in the background, while this rank generates.

        Raises:
            EngineRefused: not connected, or asleep: live weights are read for it.
        """
        self._require_awake()
        self._failure = None
        self.receiver.begin_staging(version)

    def finish_weight_update(self) -> None:
        """Nothing is left to do: weights are written in place."""

    def shutdown(self) -> None:
        """Let go of the run; the weights stay as they are."""
        receiver, self._receiver = self._receiver, None
        self._store = self._connection = ""
        if receiver is not None:
            receiver.close()

    def status(self) -> RankStatus:
        """Where this rank stands; never raises."""
        found = self._receiver.status() if self._receiver else None
        found = found or RankStatus(rank=0, n_ranks=1, store="", state="unconnected")
        return replace(
            found,
            rank=self._ranks.rank,
            n_ranks=self._ranks.n_ranks,
            store=self._store,
            connection=self._connection,
            n_replicas=self.vllm_config.parallel_config.data_parallel_size,
            failure=self._failure or found.failure,
            is_asleep=self.is_asleep(),
        )

    def _together(self, work: Callable[[], object]) -> bool:
        """Do it on every rank; False where it failed on one, and the last rank raises."""
        self._failure = together(self._ranks, work)
        if self._failure is not None and self._ranks.rank == self._ranks.n_ranks - 1:
            raise self._failure.as_error()
        return self._failure is None

    def _connect(self, init_info: InitInfo) -> None:
        self._require_awake(is_connected=False)
        target = LayoutTarget(
            self.model.load_weights,
            self.model.named_parameters,
            # In a pause nothing else runs; the ranks of a host share it.
            n_threads=max(1, len(unpinned_processors()) // self._ranks.n_ranks),
        )
        options, checks = dict(init_info.options), AfterPause()
        subscriber = Subscriber(
            open_store(init_info.store, options=options) if options else init_info.store,
            target,
            key=init_info.key,
            worker=f"{init_info.worker or default_worker()}-rank{self._ranks.rank}",
            cache=Path(init_info.cache) if init_info.cache else None,
            retry=RetryPolicy(deadline_s=init_info.retry_s) if init_info.retry_s else None,
            background=lambda n, name: checks if name == "check" else threads(n, name),
        )
        self.shutdown()
        self._receiver = RankReceiver(subscriber, target, checks)
        self._store, self._connection = init_info.store, init_info.connection

    def _load_newest(self, init_info: InitInfo) -> None:
        """The newest that rank 0 sees, on every rank; nothing where nothing was published yet."""
        if init_info.load and self._together(lambda: self.receiver.begin_poll().result()):
            version = self._ranks.gather(self.receiver.status().newest)[0]
            if version >= 0:
                self.receive_weights(UpdateInfo(version))

    def _ready(self, version: int) -> None:
        self._require_awake()
        self.receiver.stage(version)
        self.receiver.require_staged(version)

    def _require_awake(self, *, is_connected: bool = True) -> None:
        if is_connected:
            _ = self.receiver
        if self.is_asleep():
            raise EngineRefused(
                "the engine is asleep, its weights are not in memory: wake it first"
            )


def _require_model(base: Any) -> None:
    """Refuse a vLLM whose engines cannot reach the weights.

    Raises:
        EngineRefused: says which vLLM will do.
    """
    if "model" not in inspect.signature(base).parameters:
        from vllm import __version__

        raise EngineRefused(
            f"vLLM {__version__} does not give weight-transfer engines the model;"
            " Weightwire serves vLLM 0.25 and newer, and is tested with 0.32"
        )


def _parsed(kind: type[Info], found: Info | dict[str, Any]) -> Info:
    """A request's body as a typed value.

    Raises:
        EngineRefused: a field that is missing or unknown.
    """
    if isinstance(found, kind):
        return found
    try:
        return kind(**found)  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        raise EngineRefused(f"not {kind.__name__}: {error}") from error
