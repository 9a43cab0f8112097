"""A transformers model that follows a run while it generates."""

import os

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import weightwire as ww
from weightwire.engines.torch_module import TorchModuleEngine

STORE = os.environ.get("RUN", "runs/transformers")  # or s3://bucket/run-7

config = LlamaConfig(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=2,
    tie_word_embeddings=True,
)


def train(model, publisher, n_steps):
    """The trainer's side: fp32 masters, published as bf16."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    for step in range(1, n_steps + 1):
        tokens = torch.randint(0, 256, (2, 32))
        loss = model(input_ids=tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield publisher.publish(step=step).result()


def main():
    trained = LlamaForCausalLM(config)
    publisher = ww.Publisher(STORE, ww.cast(trained, "bf16"))
    publisher.publish(step=0).result()

    model = LlamaForCausalLM(config).eval()  # usually in another process
    engine = TorchModuleEngine(STORE, model, max_lag=2)
    prompt = torch.tensor([[1, 2, 3]])
    for published in train(trained, publisher, n_steps=4):
        with engine.generation() as version:  # the weights do not move in here
            tokens = model.generate(prompt, max_new_tokens=8, do_sample=False, pad_token_id=0)
        print("trained", published.version, "- version", version, "says", tokens[0, 3:].tolist())

    assert engine.wait_for(published.version, timeout_s=60)
    assert engine.digest == published.digest
    for name, parameter in trained.named_parameters():
        held = model.get_parameter(name)
        assert torch.equal(held, parameter.to(torch.bfloat16).float())
    print("holds version", engine.version, "bit for bit")
    engine.close()
    publisher.close()


if __name__ == "__main__":
    main()
