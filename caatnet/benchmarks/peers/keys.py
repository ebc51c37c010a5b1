"""Keys of the benchmark of other projects' steps."""

from caatnet.benchmarks.keys import (
  PROMPT_DOC,
  RESULTS_DOC,
  ROUNDS_DOC,
  TOKENS_DOC,
)
from caatnet.schema import register
from caatnet.schema.fields import COUNT, field


@register.benchmark("peers")
class Peers:
  """Training steps and decoding, compared with those of other projects."""

  results: str = field("runs/peers.json", RESULTS_DOC)
  rounds: int = field(3, ROUNDS_DOC, COUNT)
  steps: int = field(2, "Training steps per round.", COUNT)
  variants: tuple[tuple[str, str], ...] = field(
    (
      ("r=1", "parallel.tensor=1"),
      ("r=1, unrolled", "parallel.tensor=1 model.unroll=8"),
      ("r=8 lanes, p=1", "parallel.tensor=8"),
      ("r=8 lanes, p=.5", "parallel.tensor=8 sync.p=0.5"),
    ),
    "Label and config overrides of each of our training steps.", empty=True,
  )
  batches: tuple[int, ...] = field(
    (1, 16, 64), "Sequences that are decoded together.", COUNT, empty=True,
  )
  prompt: int = field(64, PROMPT_DOC, COUNT)
  tokens: int = field(64, TOKENS_DOC, COUNT)
  threads: int = field(2, "Threads of torch.", COUNT)
  python_path: str = field(
    "", 'Python with the packages of peers; "" makes an environment with '
    "`packages`.",
  )
  packages: tuple[str, ...] = field(
    ("torch", "transformers", "llama-cpp-python", "gguf"),
    "Requirements of the environment that is made.", empty=True,
  )
  compiled: bool = field(
    True, "Whether Hugging Face's model is also timed with torch.compile, "
    "which needs a C++ compiler.",
  )
  llama: tuple[str, ...] = field(
    ("F32", "Q8_0"), "Types of llama.cpp's matrices; () for no llama.cpp.",
    ("F32", "Q8_0"), empty=True,
  )
  folder: str = field(
    ".cache/peers", "Folder of the environment, which is made once."
  )
  nanodo: str = field(
    "", "Checkout of https://github.com/google-deepmind/nanodo, which is in no "
    'package registry; "" for none.',
  )
  vllm: str = field(
    "", 'Python with vllm for CPUs, whose server is compared with ours; "" for '
    "none.",
  )
  llama_server: str = field(
    "", "Program llama-server of llama.cpp, which is compared with our server; "
    '"" for none.',
  )
