"""Converted Hugging Face checkpoints as experts."""

import pathlib
import shutil

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from caatnet.composition import library
from caatnet.config import experiments
from caatnet.data import tokenizers
from caatnet.interop import huggingface
from caatnet.interop.source import open_published_model
from caatnet.train import tokenizer
from configs.caatnet import base
from tests.caatnet.data.small_tokenizers import llama_files

FIXTURES = pathlib.Path(__file__).parents[2] / "fixtures/families"
FAMILY = "qwen2"


def convert(folder, to):
  """Writes a run from a published folder, as launch.convert does."""
  source = open_published_model(folder, 1)
  config = base.get_config()
  config.model.update(source.section)
  config.data.seq_len = config.model.max_positions
  config.parallel.tensor = source.ranks
  huggingface.write_run(source, experiments.build(config), to)
  return to


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  return convert(
    FIXTURES / FAMILY, tmp_path_factory.mktemp("library") / "base"
  )


def test_converted_checkpoint_with_the_shapes_of_the_base_is_an_expert(
  run, tmp_path
):
  made = library.create(tmp_path / "library", run)
  published = tmp_path / "other"
  shutil.copytree(FIXTURES / FAMILY, published)
  tensors = load_file(published / "model.safetensors")
  tensors = {name: (x + 1).astype(x.dtype) for name, x in tensors.items()}
  save_file(tensors, published / "model.safetensors")
  other = convert(published, tmp_path / "run")
  library.add_run(made, "other", other, kind="python", origin="checkpoint")
  jax.tree.map(
    np.testing.assert_array_equal,
    made.read("other")[1](), library.read_params(other),
  )
  wider = convert(FIXTURES / "llama_3", tmp_path / "llama")
  with pytest.raises(ValueError, match=r"has other parameters: config\.model"):
    library.add_run(made, "wider", wider)
  assert made.names == ("base", "other")


def test_put_keeps_the_fields_of_a_replaced_expert_that_are_not_given(
  run, tmp_path
):
  made = library.create(tmp_path / "library", run)
  library.put(made, "x", False, str(run), "python", "")
  library.put(made, "x", True, str(run), "", "of Python")
  *_, entry = made.entries
  assert (entry.name, entry.kind, entry.description) == (
    "x", "python", "of Python"
  )


def test_put_reads_a_file_with_all_parameters(run, tmp_path):
  made = library.create(tmp_path / "library", run)
  (base,) = made.entries
  path = shutil.copy(made.path / base.file, tmp_path / "x.safetensors")
  library.put(made, "x", False, str(path), "c", "")
  library.put(made, "x", True, str(path), "", "again")
  *_, entry = made.entries
  assert (entry.kind, entry.description) == ("c", "again")
  jax.tree.map(
    np.testing.assert_array_equal, made.read("x")[1](), made.read("base")[1]()
  )
  library.add_run(made, "small", run, form="int8")
  small = made.path / made.entries[-1].file
  with pytest.raises(ValueError, match="has the form 'int8'; it must be 'whol"):
    library.put(made, "y", False, str(small), "", "")


def test_run_with_another_tokenizer_is_refused(run, tmp_path):
  made = library.create(tmp_path / "library", run)
  other = tmp_path / "other"
  shutil.copytree(run, other)
  files = llama_files()
  tokens = tokenizers.LibraryTokenizer("llama", files, "test")
  tokenizer.write(other / tokenizer.FOLDER, tokens.files)
  with pytest.raises(ValueError, match="'x' has the tokenizer"):
    library.add_run(made, "x", other)
