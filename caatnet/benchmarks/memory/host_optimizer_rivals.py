"""AdamW of torch and of DeepSpeed, for the benchmark of the host optimizer.

It runs in a separate Python, which has torch and possibly deepspeed, and
imports nothing of this repository. It reads one JSON value per line from stdin
and writes one to stdout for each: first the number of elements, answered by the
versions of the libraries that work; then a library's name, answered by the
seconds of a step.
"""

import json
import os
import sys
import time


def main() -> None:
  """Takes the steps that stdin asks for."""
  answers = os.fdopen(os.dup(1), "w")
  os.dup2(2, 1)  # libraries print to stdout
  import torch

  asked = json.loads(sys.stdin.readline())
  torch.set_num_threads(asked["threads"])
  weight = torch.nn.Parameter(torch.ones(asked["size"]))
  weight.grad = torch.full((asked["size"],), 1e-3)
  settings = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}
  optimizers = {
    "torch": torch.optim.AdamW([weight], fused=True, **settings)
  }
  versions = {"torch": torch.__version__}
  try:
    import deepspeed
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    optimizers["deepspeed"] = DeepSpeedCPUAdam([weight], **settings)
    versions["deepspeed"] = deepspeed.__version__
  except Exception as error:  # its extension is built on first use
    print(f"without DeepSpeed: {error}", file=sys.stderr)
  print(json.dumps(versions), file=answers, flush=True)
  for line in sys.stdin:
    step = optimizers[json.loads(line)].step
    start = time.perf_counter()
    step()
    print(json.dumps(time.perf_counter() - start), file=answers, flush=True)


if __name__ == "__main__":
  main()
