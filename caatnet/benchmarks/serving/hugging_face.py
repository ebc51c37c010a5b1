"""Script that times Hugging Face's generate, for the benchmark of decoding.

It runs in a separate Python, which has torch and transformers, and imports
nothing of this repository. It reads one JSON object per line from stdin and
writes one to stdout for each: first the sizes of a Llama, which gets random
weights, and whether torch compiles it; then for each round the number of
prompts and the lengths.
"""

import json
import sys
import time


def main() -> None:
  """Creates the model of stdin's first line; times a round per further line."""
  import torch
  import transformers

  asked = json.loads(sys.stdin.readline())
  torch.set_num_threads(asked["threads"])
  torch.manual_seed(0)
  config = transformers.LlamaConfig(**asked["model"])
  model = transformers.LlamaForCausalLM(config).float().eval()
  options = {}
  if asked["compiled"]:
    compiled = transformers.CompileConfig(mode="default", dynamic=False)
    compiled._compile_all_devices = True  # otherwise only on GPUs
    options = {"cache_implementation": "static", "compile_config": compiled}
  answer({
    "torch": torch.__version__,
    "transformers": transformers.__version__,
    "attention": model.config._attn_implementation,
    "num_params": sum(p.numel() for p in model.parameters()),
  })
  for line in sys.stdin:
    asked = json.loads(line)
    shape = asked["batch"], asked["prompt"]
    prompts = torch.randint(config.vocab_size, shape)
    arrivals = []

    def arrived(tokens, scores, arrivals=arrivals, **_):
      """Stopping criterion that never stops; it records arrival times."""
      arrivals.append(time.perf_counter())
      return torch.zeros(len(tokens), dtype=torch.bool)

    start = time.perf_counter()
    with torch.inference_mode():
      model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        min_new_tokens=asked["tokens"],
        max_new_tokens=asked["tokens"],
        do_sample=False,
        use_cache=True,
        pad_token_id=0,
        stopping_criteria=[arrived],
        **options,
      )
    answer({
      "prompt_seconds": arrivals[0] - start,
      "decode_seconds": arrivals[-1] - arrivals[0],
    })


def answer(value: object) -> None:
  """Writes a line of JSON."""
  print(json.dumps(value), flush=True)


if __name__ == "__main__":
  main()
