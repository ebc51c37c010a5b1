"""From text to tokenizer, run, resumed run and evaluation."""

import pytest

from caatnet.config import experiments
from caatnet.config.override import override
from caatnet.data import bpe, sources
from caatnet.train import loop
from caatnet.train.checkpoint import export
from caatnet.train.evaluate import make_evaluate
from configs.caatnet import bpe as config

SMALL = (
  "model.num_layers=1 parallel.tensor=1 model.vocab_size=300 "
  "data.validation_percent=40.0 data.validation_windows=8 "
  "optimizer.warmup_steps=0 optimizer.decay_steps=4"
)


def flags(keys):
  return ["--config=configs/caatnet/bpe.py:test",
          *(f"--config.{key}" for key in keys.split())]


def train(workdir, keys):
  made = override(config.get_config("test"), f"{SMALL} {keys}")
  return loop.train(
    experiments.build(made, {"tensor": 1}), workdir, quiet=True
  )


def test_smaller_vocabulary_than_requested_is_explained(launch, tmp_path):
  text, folder = tmp_path / "text", tmp_path / "made"
  text.mkdir()
  for name in "abcdefgh":
    (text / f"{name}.txt").write_text("to be or not to be\n" * 9 + name)
  ended = launch(
    "tokenizer", *flags(f"{SMALL} data.path={text} data.tokenizer={folder}")
  )
  assert ended.returncode == 0, ended.stderr
  # 256 bytes, the separator, and 9 merges.
  assert "\n266 tokens, not 300: in the words of the training" in ended.stdout


def test_tokenizer_is_trained_used_kept_and_required(launch, tmp_path):
  text, folder = tmp_path / "text", tmp_path / "made"
  text.mkdir()
  for number in range(12):
    (text / f"{number}.txt").write_text(
      f"the cat {number} and the hat {number * 7}: that is that\n" * 20
      + f"a part has only {'qxz'[number % 3] * 9}\n" * 9
    )
  keys = f"data.path={text} data.tokenizer={folder}"
  ended = launch("tokenizer", *flags(f"{SMALL} {keys}"))
  assert ended.returncode == 0, ended.stderr
  documents = sources.load_documents(str(text), 40.0)
  files = bpe.train_tokenizer((x.decode() for x in documents.train), 300)
  assert {x.name: x.read_text() for x in folder.iterdir()} == files
  assert f"{sum(map(len, documents.train)):,}" in ended.stdout
  assert "tokens, not" not in ended.stdout

  workdir = tmp_path / "run"
  for num_steps in (2, 4):  # the second run resumes
    result = train(workdir, f"{keys} train.num_steps={num_steps}")
  assert {x: (workdir / "tokenizer" / x).read_text() for x in files} == files
  folder.rename(tmp_path / "elsewhere")
  experiment = experiments.from_folder(workdir, {"tensor": 1})
  params, step = export.read_stored_params(experiment, workdir)
  assert step == 4
  dataset = experiment.data.load(experiment.seed)
  found = make_evaluate(experiment.program, experiment.data.batch_size)(
    params, dataset.validation
  )
  assert dataset.measures(found.means) == pytest.approx(result.measures)

  folder.mkdir()
  (folder / "tokenizer.json").write_text(files["tokenizer.json"])
  with pytest.raises(ValueError, match=r"tokenizer made \(sha256 .* made \("):
    train(workdir, f"{keys} train.num_steps=4")  # no separator
