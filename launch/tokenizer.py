"""Trains a tokenizer on the training documents of a config's text.

  python -m launch.tokenizer --config=configs/caatnet/bpe.py
  python -m launch.tokenizer --config=configs/caatnet/tiny.py \
    --config.data.path=FILE_OR_FOLDER --vocab_size=8192 --output=FOLDER

A training run uses it by --config.data.tokenizer=FOLDER, with a
config.model.vocab_size of at least its size. Hugging Face transformers can also
read the folder.
"""

from absl import flags

from launch import options

FLAGS = flags.FLAGS
flags.DEFINE_integer(
  "vocab_size", None, "Number of tokens; config.model.vocab_size if unset.", 257
)


def main() -> None:
  from etils import epath

  from caatnet.config import sections
  from caatnet.config.data import DATA
  from caatnet.data import bpe, encoding, sources, tokenizers
  from caatnet.show import tables
  from caatnet.train import tokenizer
  from parallel.base.checks import known
  from parallel.base.naming import prefix_error_keys

  config = FLAGS.config
  if "data" not in config or "model" not in config:
    raise ValueError("--config is not a training run: it has no data or model")
  known("config.data.name=", config.data.name, ("text",))
  data = sections.build_selected("data", DATA, config.data)
  folder = FLAGS.output or data.tokenizer
  if not folder:
    raise ValueError("--output is required if config.data.tokenizer is ''")
  documents = sources.load_documents(
    data.path, data.validation_percent, data.validation_path
  )
  size = FLAGS.vocab_size or config.model.vocab_size
  with prefix_error_keys("config.model", ("vocab_size",)):
    texts = (text.decode() for text in documents.train)
    files = bpe.train_tokenizer(texts, size)
  tokenizer.write(epath.Path(folder).expanduser(), files)
  made = tokenizers.load(folder, "--output")
  corpus = encoding.encode_corpus(documents, made).corpus
  sides = {
    "training": (documents.train, corpus.train),
    "validation": (documents.validation, corpus.validation),
  }
  rows = []
  for side, (texts, tokens) in sides.items():
    size_bytes = sum(map(len, texts))
    rows.append([
      side, f"{len(texts):,}", f"{size_bytes:,}", f"{len(tokens):,}",
      f"{size_bytes / len(tokens):.3f}",
    ])
  tables.print_table(
    f"{made.vocab_size:,} tokens of {documents.name}",
    ["documents", "number", "bytes", "tokens", "bytes per token"], rows,
  )
  if made.vocab_size < size:
    print(f"{made.vocab_size:,} tokens, not {size:,}: in the words of the "
          "training documents no other pair of tokens occurs twice")
  print(f"tokenizer {tokenizer.summary(made)} in {folder}")
  print(
    f"train on it: --config.data.tokenizer={folder} "
    f"--config.model.vocab_size={made.vocab_size}"
  )


if __name__ == "__main__":
  options.run(main, uses=("config", "output"), writes=("output/",), helps={
    "output": "Folder to write; config.data.tokenizer if unset."
  })
