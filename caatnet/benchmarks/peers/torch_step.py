"""Script that times training steps of Hugging Face's Llama, for `peers`.

It runs in a separate Python, which has torch and transformers, and imports
nothing of this repository. It reads one JSON object per line from stdin and
writes one to stdout for each: first the sizes of the model and of the batch,
whose values are random, and whether torch compiles the model; then for each
round the number of steps.
"""

import json
import sys
import time


def main() -> None:
  """Creates the model of stdin's first line; times steps for each next line."""
  import torch
  import transformers

  asked = json.loads(sys.stdin.readline())
  torch.set_num_threads(asked["threads"])
  torch.manual_seed(0)
  config = transformers.LlamaConfig(**asked["model"], use_cache=False)
  model = transformers.LlamaForCausalLM(config).float().train()
  forward = torch.compile(model) if asked["compiled"] else model
  optimizer = torch.optim.AdamW(
    model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True
  )
  tokens = torch.randint(config.vocab_size, (asked["batch"], asked["length"]))

  def step() -> float:
    loss = forward(input_ids=tokens, labels=tokens).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()

  answer({
    "name": f"transformers {transformers.__version__}, "
            f"torch {torch.__version__}"
            f"{', compiled' if asked['compiled'] else ''}",
    "attention": model.config._attn_implementation,
    "num_params": sum(p.numel() for p in model.parameters()),
  })
  for line in sys.stdin:
    count = json.loads(line)["steps"]
    start = time.perf_counter()
    loss = [step() for _ in range(count)][-1]
    answer({"seconds": (time.perf_counter() - start) / count, "loss": loss})


def answer(value: object) -> None:
  """Writes a line of JSON."""
  print(json.dumps(value), flush=True)


if __name__ == "__main__":
  main()
