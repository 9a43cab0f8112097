"""The SGLang loader and client against a stand-in server with SGLang's call signatures. Not SGLang."""

from __future__ import annotations

import json
import os
import pickletools
import subprocess
import sys
import threading
import urllib.request
from base64 import b64decode
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from isolated_scripts import example_of, run_script

import weightwire as ww
from weightwire.engines.sglang import SglangServer, follow, load
from weightwire.engines.sglang.command import Command, command_in, pairs_of, payload
from weightwire.errors import EngineRefused, NotARun, NoWay

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
from stand_in_model import StandInModel, checkpoint  # noqa: E402


class Run:
    """A trainer, and every version it published."""

    def __init__(self, store: Path) -> None:
        self.store, self.state = store, checkpoint()
        self.versions: list[dict[str, torch.Tensor]] = []
        self._publisher = ww.Publisher(store, self.state)

    def publish(self) -> int:
        if self.versions:
            self._train()
        done = self._publisher.publish().result()
        self.versions.append({name: tensor.clone() for name, tensor in self.state.items()})
        return done.version

    def close(self) -> None:
        self._publisher.close()

    def expected(self, version: int, n_ranks: int) -> list[dict[str, str]]:
        """SHA-256 of every parameter of a fresh load of that version, rank by rank."""
        models = [StandInModel(rank, n_ranks) for rank in range(n_ranks)]
        for model in models:
            model.load_weights(self.versions[version].items())
        return [model.sha256s() for model in models]

    def _train(self) -> None:
        generator = torch.Generator().manual_seed(len(self.versions))
        for tensor in self.state.values():
            moved = torch.rand(tensor.shape, generator=generator) < 0.02
            tensor.view(torch.int16).add_(moved.to(torch.int16))


@contextmanager
def stand_in(n_ranks: int, *flags: str) -> Iterator[tuple[str, Any]]:
    process = subprocess.Popen(
        [sys.executable, str(HERE / "stand_in_sglang.py"), "0", str(n_ranks), *flags],
        stdout=subprocess.PIPE,
        text=True,
        cwd=HERE,
    )
    try:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{int(process.stdout.readline())}", process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.fixture(scope="module")
def shared() -> Iterator[tuple[str, Any]]:
    """One server of two ranks for several tests: each connects it to a run of its own."""
    with stand_in(2) as made:
        yield made


def ask(url: str, path: str) -> Any:
    with urllib.request.urlopen(f"{url}{path}", timeout=60) as answer:
        return json.loads(answer.read())


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    made = Run(tmp_path / "run")
    made.publish()
    yield made
    made.close()


@pytest.mark.parametrize("flags", [(), ("--old",)], ids=["with sessions", "before sessions"])
def test_stand_in_tp2_serves_every_version_bit_for_bit(run: Run, flags: tuple[str]) -> None:
    with stand_in(2, *flags) as (url, _):
        server = SglangServer(url)
        assert server.connect(run.store).version == 0
        assert ask(url, "/weights_checker")["ranks"] == run.expected(0, 2)
        for _ in range(5):
            version = run.publish()
            pause = server.update(version)
            assert (pause.version, pause.n_ranks) == (version, 2)
            assert pause.n_changed > 0
            assert ask(url, "/weights_checker")["ranks"] == run.expected(version, 2)
            assert ask(url, "/model_info")["weight_version"] == str(version)
        info = ask(url, "/model_info")
        assert info["pauses"] == ["in_place"] + ["retract"] * 6
        assert info["n_flushes"] == 6
        server.close()


def test_stand_in_under_load_sees_one_version_in_each_forward_pass(
    run: Run, shared: tuple[str, Any]
) -> None:
    answers: list[Any] = []
    stop = threading.Event()

    url, _ = shared
    server = SglangServer(url)
    server.connect(run.store)

    def generate() -> None:
        while not stop.is_set():
            answers.append(ask(url, "/generate"))

    threads = [threading.Thread(target=generate) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(8):
            server.update(run.publish())
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    server.close()
    expected = {str(version): run.expected(version, 2) for version in range(9)}
    assert all(answer["seen"] in expected.values() for answer in answers)
    assert {a["weight_version"] for a in answers if a["seen"] == expected["8"]} <= {"7", "8"}
    assert len({a["weight_version"] for a in answers}) > 1


def test_stand_in_stages_while_requests_run_and_moves_nothing(
    run: Run, shared: tuple[str, Any]
) -> None:
    url, _ = shared
    server = SglangServer(url)
    server.connect(run.store)
    version = run.publish()
    server.stage(version)
    status = server.wait_staged(version)
    assert {rank.staged for rank in status.ranks} == {version}
    assert ask(url, "/generate")["seen"] == run.expected(0, 2)
    server.activate(version)
    assert server.wait_checked().version == version
    assert ask(url, "/generate")["seen"] == run.expected(version, 2)
    server.close()


def test_stand_in_refuses_to_activate_what_is_not_staged_and_serves_on(
    run: Run, shared: tuple[str, Any]
) -> None:
    url, process = shared
    server = SglangServer(url)
    server.connect(run.store)
    run.publish()
    with pytest.raises(EngineRefused, match="not staged"):
        server.activate(1)
    with pytest.raises(NoWay, match="no version 7"):
        server.update(7)
    assert not ask(url, "/model_info")["is_paused"]
    assert server.update(1).version == 1
    assert process.poll() is None
    server.close()


def test_stand_in_survives_a_store_that_is_no_run_and_says_so(
    run: Run, shared: tuple[str, Any], tmp_path: Path
) -> None:
    url, process = shared
    server = SglangServer(url)
    with pytest.raises(NotARun):
        server.connect(tmp_path / "nothing")
    assert process.poll() is None
    assert server.connect(run.store).version == 0
    server.close()


def test_stand_in_without_the_loader_is_told_how_to_start(run: Run) -> None:
    with stand_in(1, "--no-loader") as (url, _):
        server = SglangServer(url)
        with pytest.raises(EngineRefused, match="--custom-weight-loader"):
            server.connect(run.store)
        server.close()


def test_stand_in_is_followed_by_a_sidecar(run: Run) -> None:
    run.publish()
    with stand_in(1) as (url, _):
        server = SglangServer(url)
        [followed] = follow(run.store, server, until=1, poll_s=0.05)
        assert (followed.version, [*followed.pauses]) == (1, [url])
        assert ask(url, "/weights_checker")["ranks"] == run.expected(1, 1)
        server.close()


def test_a_second_client_takes_the_stand_in_over(run: Run, shared: tuple[str, Any]) -> None:
    url, _ = shared
    first = SglangServer(url)
    first.connect(run.store)
    first.close()
    version = run.publish()
    second = SglangServer(url)
    assert second.connect(run.store).version == version
    assert ask(url, "/weights_checker")["ranks"] == run.expected(version, 2)
    second.close()


def test_the_example_of_the_page_runs_against_the_stand_in(
    tmp_path: Path, shared: tuple[str, Any]
) -> None:
    from safetensors.torch import save_file

    save_file(checkpoint(), tmp_path / "model.safetensors")
    output = run_script(
        example_of("sglang.md", "sglang_loader.py"),
        environment={
            **os.environ,
            "RUN": str(tmp_path / "run"),
            "SGLANG": shared[0],
            "CHECKPOINT": str(tmp_path / "model.safetensors"),
        },
    )
    assert "all ranks hold version 3" in output


def test_a_payload_names_nothing_that_needs_shared_memory() -> None:
    raw = b64decode(payload(Command("activate", 1, 2, version=7)))
    named = {
        argument
        for opcode, argument, _ in pickletools.genops(raw)
        if opcode.name in {"GLOBAL", "STACK_GLOBAL", "SHORT_BINUNICODE", "BINUNICODE"}
        and isinstance(argument, str)
    }
    assert {"rebuild_tensor", "rebuild_storage_empty"} <= named
    assert not {"rebuild_storage_fd", "rebuild_storage_filename", "_load_from_bytes"} & named


def test_a_command_survives_the_way_to_the_loader() -> None:
    command = Command("connect", 1, 2, store="s3://b/r", mailbox="/m", options={"region": "x"})
    assert command_in(pairs_of(command)) == command


@pytest.mark.parametrize(
    "pairs",
    [
        [("model.embed.weight", torch.zeros(1))],
        [],
        [("weightwire:{", torch.zeros(0))],
        [('weightwire:{"do": "connect", "strange": 1}', torch.zeros(0))],
    ],
)
def test_the_loader_never_raises_because_that_would_end_the_server(pairs: Any) -> None:
    with pytest.raises(EngineRefused):
        command_in(pairs)
    load(StandInModel(0, 1), pairs)
