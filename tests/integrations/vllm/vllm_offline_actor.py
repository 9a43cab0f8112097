"""A process with ``vllm.LLM`` in it: follows a run, and prints its checksums and tokens as JSON."""

from __future__ import annotations

import json
import sys

from vllm import LLM, SamplingParams

from weightwire.engines.vllm import OfflineEngine


def main(model: str, store: str, last: str, prompts: str) -> None:
    """Every version in turn, then what a server would say."""
    llm = LLM(
        model,
        dtype="float32",
        enforce_eager=True,
        max_model_len=512,
        weight_transfer_config={"backend": "weightwire"},
        worker_extension_cls="weightwire.engines.vllm.worker.WeightwireWorker",
    )
    engine = OfflineEngine(llm)
    engine.connect(store, update=False)
    for version in range(int(last) + 1):
        engine.update(version)
    asked = [{"prompt_token_ids": prompt} for prompt in json.loads(prompts)]
    sampling = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    said = llm.generate(asked, sampling, use_tqdm=False)
    (checksums,) = llm.collective_rpc("compute_weight_checksums")
    tokens = [list(each.outputs[0].token_ids) for each in said]
    version = llm.get_weight_version()
    print("RESULT" + json.dumps({"checksums": checksums, "tokens": tokens, "version": version}))


if __name__ == "__main__":
    main(*sys.argv[1:])
