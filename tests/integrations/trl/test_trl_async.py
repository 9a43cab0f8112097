"""TRL's asynchronous GRPO against a real vLLM server: patches while it generates, a pause to write them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import trl_async
import vllm_servers
from async_training import make_checkpoint, run_on_cpu
from tcp_gates import Gate
from tiny_models import Training
from transformers import AutoModelForCausalLM
from vllm_servers import Server

import weightwire as ww
from weightwire.engines.vllm.server import VllmServer
from weightwire.errors import EngineUnavailable, StopError, StoreUnavailable
from weightwire.store.contract import ObjectInfo, ObjectStore
from weightwire.store.open import open_store
from weightwire.store.retry import RetryPolicy
from weightwire.trainers.trl import WeightwireTransfer
from weightwire.trust.keys import SigningKey

pytestmark = pytest.mark.long

ON_CPU = {
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "report_to": [],
    "disable_tqdm": True,
    "dataloader_pin_memory": False,
    "save_strategy": "no",
}


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("async") / "model")


@pytest.fixture(scope="session")
def server(checkpoint: Path) -> Iterator[Server]:
    """One server for all: each test has a run of its own."""
    names = ("--served-model-name", "tiny", str(checkpoint))
    log = checkpoint.parent / "server.log"
    with vllm_servers.running(
        checkpoint, log, arguments=(*vllm_servers.BACKEND, *names)
    ) as running:
        yield running


@pytest.fixture
def training(checkpoint: Path) -> Training:
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    return Training(model, learning_rate=1e-5)


def pairs(training: Training) -> Iterator[tuple[str, Any]]:
    """What TRL streams: the masters, one at a time."""
    yield from ((name, p.detach()) for name, p in training.model.named_parameters())


def sync(transfer: WeightwireTransfer, training: Training) -> None:
    """TRL's order of calls."""
    transfer.pause()
    transfer.send_weights(pairs(training))
    transfer.resume()


def digest_of(training: Training) -> str:
    return ww.digest(dict(training.weights()))


def test_async_grpo_sends_patches_and_the_server_holds_the_trainers_weights(
    server: Server, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_on_cpu(monkeypatch)
    trainer = trl_async.train(
        str(checkpoint),
        str(tmp_path / "run"),
        server.url,
        output_dir=str(tmp_path / "out"),
        max_steps=4,
        num_generations=4,
        per_device_train_batch_size=4,
        max_completion_length=12,
        queue_maxsize=8,
        learning_rate=1e-5,
        **ON_CPU,
    )
    syncs = trainer.weight_transfer.syncs
    assert [each.published.version for each in syncs] == [0, 1, 2, 3, 4]
    assert all(outcome.is_current for each in syncs for outcome in each.servers)
    assert all(each.published.n_bytes < each.published.n_state_bytes / 4 for each in syncs[1:])
    newest = syncs[-1].published
    assert newest.digest == ww.digest(
        {name: p.detach().to(torch.bfloat16) for name, p in trainer.model.named_parameters()}
    )
    client = VllmServer(server.url)
    assert client.prove(newest.version, newest.digest) == len(list(trainer.model.parameters()))
    client.close()


def test_server_generates_until_there_is_something_to_write(
    server: Server, training: Training, tmp_path: Path
) -> None:
    transfer = WeightwireTransfer(tmp_path / "run", server.url)
    transfer.init_weight_transfer()
    sync(transfer, training)
    training.step()
    transfer.pause()
    assert not server.get("/is_paused")["is_paused"]
    transfer.send_weights(pairs(training))
    assert not server.get("/is_paused")["is_paused"]
    assert server.get("/weight_info") == {"weight_version": "0"}
    transfer.resume()
    assert not server.get("/is_paused")["is_paused"]
    assert server.get("/weight_info") == {"weight_version": "1"}
    transfer.destroy()
    assert 0 < transfer.syncs[-1].pause_s < transfer.syncs[-1].send_s + transfer.syncs[-1].pause_s


def test_one_failing_server_of_two_stops_nobody_and_is_tried_again(
    server: Server, training: Training, tmp_path: Path
) -> None:
    with Gate(server.url) as gate:
        gate.shut()
        transfer = WeightwireTransfer(tmp_path / "run", [server.url, gate.url])
        transfer.init_weight_transfer()
        for _ in range(2):
            sync(transfer, training)
            training.step()
        transfer.destroy()
    for each in transfer.syncs:
        sound, failed = each.servers
        assert sound.is_current
        assert isinstance(failed.error, EngineUnavailable)
        assert failed.url == gate.url


def test_server_that_was_away_goes_on_with_the_newest_version(
    server: Server, training: Training, tmp_path: Path
) -> None:
    with Gate(server.url) as gate:
        transfer = WeightwireTransfer(tmp_path / "run", gate.url)
        transfer.init_weight_transfer()
        sync(transfer, training)
        for is_open in (False, True):
            training.step()
            (gate.open if is_open else gate.shut)()
            sync(transfer, training)
        assert [each.servers[0].is_current for each in transfer.syncs] == [True, False, True]
        transfer.destroy()
    client = VllmServer(server.url)
    client.prove(2, digest_of(training))
    client.close()


def test_training_without_any_server_is_stopped_before_the_first_step(
    server: Server, training: Training, tmp_path: Path
) -> None:
    with Gate(server.url) as gate:
        transfer = WeightwireTransfer(tmp_path / "run", gate.url)
        transfer.init_weight_transfer()
        gate.shut()
        with pytest.raises(EngineUnavailable):
            sync(transfer, training)
        transfer.destroy()
        late = WeightwireTransfer(tmp_path / "late", gate.url, ready_timeout_s=0)
        with pytest.raises(EngineUnavailable, match="no vLLM server answered"):
            late.init_weight_transfer()
        late.destroy()


def test_store_that_goes_away_does_not_stop_training_and_the_stream_is_drained(
    server: Server, training: Training, tmp_path: Path
) -> None:
    store = AwayStore(open_store(tmp_path / "run"))
    transfer = WeightwireTransfer(
        store, server.url, server_store=tmp_path / "run", retry=RetryPolicy(n_attempts=1)
    )
    transfer.init_weight_transfer()
    for is_away in (False, False, True, False):
        store.is_away = is_away
        stream = pairs(training)
        transfer.pause()
        transfer.send_weights(stream)
        assert next(stream, None) is None
        transfer.resume()
        training.step()
    transfer.destroy()
    assert [each.published.version for each in transfer.syncs] == [0, 1, 2]
    assert server.get("/weight_info") == {"weight_version": "2"}


def test_broken_stream_is_the_trainers_error_and_the_next_sync_covers_it(
    server: Server, training: Training, tmp_path: Path
) -> None:
    def broken() -> Iterator[tuple[str, Any]]:
        yield next(pairs(training))
        raise RuntimeError("a rank died while gathering")

    transfer = WeightwireTransfer(tmp_path / "run", server.url)
    transfer.init_weight_transfer()
    sync(transfer, training)
    training.step()
    with pytest.raises(RuntimeError, match="a rank died"):
        transfer.send_weights(broken())
    transfer.resume()
    sync(transfer, training)
    transfer.destroy()
    assert transfer.syncs[-1].published.version == 1
    assert transfer.syncs[-1].published.digest == digest_of(training)


def test_signed_run_is_validated_against_the_full_state(
    server: Server, training: Training, tmp_path: Path
) -> None:
    key = SigningKey.generate()
    transfer = WeightwireTransfer(tmp_path / "run", server.url, mode="validate", key=key)
    transfer.init_weight_transfer()
    for _ in range(2):
        sync(transfer, training)
        training.step()
    transfer.destroy()
    assert transfer.syncs[-1].published.is_validated
    assert transfer.syncs[-1].servers[0].is_current
    with pytest.raises(StopError, match="init_weight_transfer"):
        transfer.send_weights(pairs(training))


def test_store_that_only_the_trainer_can_open_needs_a_path_for_the_servers() -> None:
    with pytest.raises(StopError, match="server_store"):
        WeightwireTransfer(AwayStore(open_store("memory://")), "http://127.0.0.1:1")


class AwayStore:
    """Another store, which can go away."""

    def __init__(self, store: ObjectStore) -> None:
        self._store, self.is_away = store, False

    def put(self, key: str, data: bytes | Iterable[bytes]) -> None:
        self._here().put(key, data)

    def create(self, key: str, data: bytes) -> bool:
        return self._here().create(key, data)

    def read(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        return self._here().read(key, start, stop)

    def list(self, prefix: str, after: str = "") -> Iterator[ObjectInfo]:
        return self._here().list(prefix, after)

    def delete(self, key: str) -> None:
        self._here().delete(key)

    def _here(self) -> ObjectStore:
        if self.is_away:
            raise StoreUnavailable("the store is away")
        return self._store
