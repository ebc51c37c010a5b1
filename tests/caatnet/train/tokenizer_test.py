"""Properties of a run's tokenizer: kept with the run, and never replaced."""

import contextlib
import itertools
import json
import shutil

from etils import epath
import pytest

from caatnet.config import experiments
from caatnet.config.override import override
from caatnet.data import tokenizers
from caatnet.data.tokenizers import LibraryTokenizer
from caatnet.train import loop, records, tokenizer
from configs.caatnet import bpe
from configs.images import tiny as images
from tests.caatnet.data.small_tokenizers import (
  bpe_files,
  llama_files,
  subject,
  write,
)
from tests.parallel.base.files_test import Killed, watched

CONFIG = {"data": {"name": "text", "tokenizer": "x"}}


def begin(workdir, made, config=CONFIG):
  """Executes the steps of a training run before its first step."""
  workdir = epath.Path(workdir)
  workdir.mkdir(exist_ok=True)
  tokenizer.check(workdir, made)
  tokenizer.copy_to_run(workdir, made)
  records.write_config(workdir, config)


@pytest.fixture
def run(tmp_path):
  """Returns a folder in the state after `begin`."""
  begin(tmp_path / "run", subject("llama"))
  return tmp_path / "run"


def change(run, name, old, new):
  path = run / "tokenizer" / name
  text = path.read_text()
  assert old in text
  path.write_text(text.replace(old, new, 1))


def test_run_keeps_the_whole_tokenizer(run):
  found, expected = tokenizer.load(run), subject("llama")
  assert found.name == "llama"
  assert found.files == expected.files
  assert found.identity == expected.identity
  assert found.stop_ids == expected.stop_ids
  begin(run, expected)  # resumes
  begin(run, LibraryTokenizer("other name", llama_files(), "x"))
  assert tokenizer.load(run).name == "llama"


def test_tokenizer_is_whole_after_a_kill_at_any_write(tmp_path):
  """Alternates between two tokenizers, until one run has its config."""
  run = tmp_path / "run"
  many = llama_files() | {"generation_config.json": '{"eos_token_id": 2}'}
  made = [LibraryTokenizer("a", many, "a"), subject("bpe")]
  for number in itertools.count(1):
    with contextlib.suppress(Killed), watched(run, number):
      begin(run, made[number % 2])
    if (run / "config.json").exists():
      break
  assert number > 8
  assert tokenizer.load(run).files == made[number % 2].files


def test_error_names_both_tokenizers(run):
  llama = subject("llama").identity[:16]
  other = subject("bpe").identity[:16]
  for made, name in (
    (subject("bpe"), rf"bpe \(sha256 {other}\)"), (subject("bytes"), "bytes"),
  ):
    with pytest.raises(ValueError, match=(
      rf"run was trained with the tokenizer llama \(sha256 {llama}\), but the "
      "config has "
      rf"{name}; see config\.data\.tokenizer, or use another --workdir"
    )):
      begin(run, made)


@pytest.mark.parametrize("data", [{"name": "text"},
                                  {"name": "text", "tokenizer": ""}])
def test_run_without_a_tokenizer_uses_bytes(data, tmp_path):
  """Covers runs that are older than the key."""
  begin(tmp_path, subject("bytes"), {"data": data})
  assert not (tmp_path / "tokenizer").exists()
  assert tokenizer.load(tmp_path).name == "bytes"
  config = {"data": {"name": "text", "tokenizer": ""}}
  begin(tmp_path, subject("bytes"), config)
  with pytest.raises(ValueError, match="with the tokenizer bytes, but the"):
    begin(tmp_path, subject("bpe"))


def test_changed_or_damaged_tokenizer_is_named(run, tmp_path):
  was = subject("llama").identity[:16]
  change(run, "tokenizer_config.json", "</s>", "<s>")
  with pytest.raises(ValueError, match=(
    rf"tokenizer has changed: the run there has the tokenizer llama \(sha256 "
    rf"{was}\), its files are sha256 [0-9a-f]{{16}}$"
  )):
    tokenizer.load(run)
  with pytest.raises(ValueError, match="has changed"):
    begin(run, subject("llama"))
  change(run, "identity.json", "sha256", "sha")
  with pytest.raises(ValueError, match=r"identity\.json is damaged: it has"):
    tokenizer.load(run)
  # Files of another program, such as a converter of weights.
  (run / "tokenizer" / "identity.json").unlink()
  assert tokenizer.load(run).separator == 1
  (run / "tokenizer" / "tokenizer_config.json").write_bytes(b"\xff")
  with pytest.raises(ValueError, match="tokenizer has a damaged file: "):
    tokenizer.load(run)
  shutil.rmtree(run / "tokenizer")
  with pytest.raises(ValueError, match=r"tokenizer\.json is missing"):
    tokenizer.load(run)
  with pytest.raises(FileNotFoundError, match="holds no run"):
    tokenizer.load(tmp_path)
  (run / "config.json").write_text('{"data": {"name": "images"}}')
  with pytest.raises(ValueError, match="holds a run without text"):
    tokenizer.load(run)


def test_experiment_of_a_folder_reads_with_its_kept_tokenizer(tmp_path):
  """Ignores the files at the path of the config."""
  source = tmp_path / "source"
  path = write(source, bpe_files())
  for number in range(9):
    (tmp_path / f"{number}.txt").write_text(f"the cat {number} " * 99)
  config = override(bpe.get_config("test"), (
    f"data.tokenizer={path} data.path={tmp_path} data.validation_percent=40"
  ))
  run = epath.Path(tmp_path / "run")
  experiment = experiments.build(config)
  dataset = experiment.data.load(0)
  begin(run, dataset.tokenizer, experiment.config)
  shutil.rmtree(source)
  kept = experiments.from_folder(run).data
  again = kept.load(0)
  assert kept.labels["loss"] == "nats per token"
  assert again.tokenizer.identity == dataset.tokenizer.identity
  assert (again.validation == dataset.validation).all()
  write(source, bpe_files(280))
  # If data differ as well, the error names the tokenizer first.
  experiment = experiments.build(override(config, "seed=5"))
  with pytest.raises(ValueError, match=r"tokenizer source \(.*source \("):
    loop.train(experiment, run, quiet=True)
  change(tmp_path / "run", "identity.json", '"sha256": "', '"sha256": "0')
  with pytest.raises(ValueError, match="has changed"):
    experiments.from_folder(run)


def test_image_runs_have_no_tokenizer(tmp_path):
  config = json.loads(images.get_config().to_json())
  begin(tmp_path, None, config)
  assert records.read_config(tmp_path) == config
  assert not (tmp_path / "tokenizer").exists()


def test_another_tokenizer_is_not_overwritten(tmp_path):
  folder = epath.Path(tmp_path / "made")
  tokenizer.write(folder, bpe_files())
  tokenizer.write(folder, bpe_files())
  with pytest.raises(ValueError, match="is another tokenizer, which other"):
    tokenizer.write(folder, bpe_files(280))
  assert tokenizers.load(str(folder)).files == bpe_files()
