"""Generates text with a run's model, or with converted weights.

  python -m launch.generate --workdir=runs/demo/p0.5 --prompt='def '
  python -m launch.generate --workdir=runs/tiny --prompt_file=prompts.jsonl \
    --temperature=0.8 --top_p=0.95 --json --config.inference.batch=32

Defaults are those of generation_config.json, or temperature 0.8 and top-p 0.95.
"""

import os

from absl import flags

from caatnet.inference.filters import FILTERS, choose_sampling_params
from launch import options

FLAGS = flags.FLAGS
flags.DEFINE_multi_string("prompt", [],
  "Text to continue; - for standard input. May be repeated.")
flags.DEFINE_string("prompt_file", None,
  'Prompts, one per line; in .jsonl the key "prompt". - for stdin as .jsonl.')
flags.DEFINE_float("temperature", None, "Temperature; 0 for greedy decoding.")
for _name, _row in FILTERS.items():
  _type = "integer" if _row.kind is int else "float"
  getattr(flags, f"DEFINE_{_type}")(_name, None, _row.help)
flags.DEFINE_integer("seed", 0, "Seed of the first prompt; prompt n adds n.")
flags.DEFINE_multi_string("stop", [], "Text that ends an answer; repeatable.")
flags.DEFINE_bool("logprobs", False, "Show each token's log-probability.")
flags.DEFINE_bool("chat", False, "Apply the chat template to prompts.")


def main() -> int:
  os.environ.setdefault("CAATNET_INTERPRET_SCHEDULER", "1")  # starts faster
  from caatnet.config import inference
  from caatnet.inference import prompts, requests, stops
  from caatnet.serving import generate
  from caatnet.show import completions
  from caatnet.train import stop, tokenizer
  from parallel.base.naming import prefix_error_keys

  texts = prompts.read(FLAGS.prompt, FLAGS.prompt_file)
  tokens = tokenizer.load(FLAGS.workdir)
  given = {name: FLAGS[name].value for name in FILTERS}
  given |= {"temperature": FLAGS.temperature}
  given = choose_sampling_params(given, tokens.generation)
  with prefix_error_keys("--", ("max_tokens", "stop", "seed", *given), ""):
    ends = stops.Stops(
      FLAGS.max_tokens, frozenset(tokens.stop_ids), tuple(FLAGS.stop)
    )
    asked = [
      requests.Request(requests.encode_prompt(text, tokens, FLAGS.chat), ends,
                       seed=FLAGS.seed + number, **given)
      for number, text in enumerate(texts)
    ]
  run = FLAGS.workdir, options.mesh(), options.overrides(), FLAGS.step
  made, params, _ = inference.from_folder(*run)
  decoder = made.decoder(params)
  screen = completions.Screen(texts, tokens, FLAGS.json, FLAGS.logprobs)
  generation = generate.Generation(
    decoder, asked, tokens, screen.on_text, screen.on_end
  )
  options.resume_gc(freeze=True)
  with stop.stop_signals() as signalled, screen:
    found = generation.run(signalled.requested)
  screen.show(found)
  completions.print_speed(
    generation.speed, len(decoder.shapes), decoder.compile_seconds
  )
  return signalled.exit_code


if __name__ == "__main__":
  options.run(
    main, required=("workdir",),
    uses=("workdir", "mesh", "cpu_devices", "json", "max_tokens", "step",
          "programs"), defaults={"max_tokens": "256"},
    changeable=("inference", "parallel.data", "model.max_positions"),
    helps={"workdir": "Folder of the run."},
  )
