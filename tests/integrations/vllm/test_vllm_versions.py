"""Version after version into live servers: bit for bit what a fresh load gives."""

from __future__ import annotations

import json
import threading
import urllib.request

import pytest
from tiny_models import as_bf16, new_model
from vllm_runs import PROMPTS, World

N_STREAMED = 150


@pytest.fixture(params=["one_rank", "two_ranks"])
def world(request: pytest.FixtureRequest) -> World:
    """Both servers in turn."""
    return request.getfixturevalue(request.param)


def test_after_five_patches_every_tensor_and_every_token_is_that_of_a_fresh_load(
    world: World,
) -> None:
    store, run = world.new_run()
    run.publish()
    world.client.connect(store)
    first = world.server.checksums()
    assert first != world.fresh_checksums

    for version in range(1, world.trained.fresh + 1):
        published = run.publish()
        pause = world.client.update(version)
        assert (pause.version, published.version) == (version, version)
        assert world.server.get("/weight_info") == {"weight_version": str(version)}
        print(
            f"{pause.n_ranks} rank(s), version {version}: {published.density:.2%} changed, "
            f"{published.n_bytes:,} bytes of {published.n_state_bytes:,}, "
            f"pause {pause.total_s * 1e3:.1f} ms, of it overwriting {pause.activate_s * 1e3:.2f} ms"
        )
    run.close()

    assert world.server.checksums() == world.fresh_checksums
    assert world.greedy() == world.fresh_tokens
    assert {rank.digest for rank in world.client.status().ranks} == {published.digest}
    n_tensors = world.client.prove(published.version, published.digest)
    assert n_tensors == len(world.trained.versions[0])
    print(
        f"{len(first)} runtime tensors and {len(world.fresh_tokens)} completions equal those of a "
        f"fresh load; {n_tensors} published tensors proven from live memory"
    )


def test_a_request_in_flight_goes_on_as_the_new_version_would(one_rank: World) -> None:
    store, run = one_rank.new_run()
    run.publish()
    one_rank.client.connect(store)
    other = dict(as_bf16(new_model(one_rank.trained.shape, seed=1)))
    one_rank.client.stage(run.publish(other).version)
    one_rank.client.wait_staged(1)

    old = one_rank.server.greedy(PROMPTS[0], N_STREAMED)
    one_rank.server.rpc("probe_slow")
    stream = Stream(one_rank, N_STREAMED)
    stream.wait_for(20)
    one_rank.client.activate(1)
    stream.join()
    one_rank.server.rpc("probe_stop")
    run.close()

    tokens = stream.tokens
    assert len(tokens) == N_STREAMED
    turn = next(n for n, pair in enumerate(zip(old, tokens, strict=True)) if len({*pair}) == 2)
    print(
        f"the first {turn} tokens are the old version's, the other {len(tokens) - turn} the new's"
    )
    assert 20 <= turn < N_STREAMED - 20
    assert tokens[turn:] == one_rank.server.greedy(PROMPTS[0] + tokens[:turn], N_STREAMED - turn)


class Stream(threading.Thread):
    """One streamed completion in the background."""

    def __init__(self, world: World, n_tokens: int) -> None:
        super().__init__()
        self._world, self._n_tokens = world, n_tokens
        self.tokens: list[int] = []
        self._came = threading.Condition()
        self.start()

    def wait_for(self, n_tokens: int) -> None:
        """Until so many tokens came."""
        with self._came:
            assert self._came.wait_for(lambda: len(self.tokens) >= n_tokens, timeout=60)

    def run(self) -> None:
        """Ask, and take tokens as they come."""
        body = {"model": "tiny", "prompt": PROMPTS[0], "max_tokens": self._n_tokens}
        body |= {"temperature": 0, "ignore_eos": True, "stream": True, "return_token_ids": True}
        request = urllib.request.Request(
            self._world.server.url + "/v1/completions",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            for line in answer:
                if line.startswith(b"data: {"):
                    for choice in json.loads(line[6:])["choices"]:
                        self._take(choice.get("token_ids") or [])

    def _take(self, tokens: list[int]) -> None:
        with self._came:
            self.tokens += tokens
            self._came.notify_all()
