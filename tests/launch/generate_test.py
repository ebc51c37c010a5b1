"""Generation from prompts: files, errors and interruption."""

import json
import os
import shutil

import pytest

from caatnet.config import experiments
from caatnet.train.checkpoint import export

SETTINGS = ("--cpu_devices=2", "--config.inference.context=24")


def test_prompts_of_a_file_become_json_lines(workdir, tmp_path, launch):
  path = tmp_path / "prompts.jsonl"
  texts = ["def ", "def ", "import os\n"]
  path.write_text("\n".join(json.dumps({"prompt": text}) for text in texts))
  ended = launch(
    "generate", f"--workdir={workdir}", f"--prompt_file={path}", "--json",
    "--logprobs", "--max_tokens=6", "--temperature=1", "--seed=5", *SETTINGS,
    "--config.inference.batch=1", "--config.parallel.data=2",
  )
  assert ended.returncode == 0, ended.stderr
  found = [json.loads(line) for line in ended.stdout.splitlines()]
  assert [line["prompt"] for line in found] == texts
  for line in found:
    assert len(line["logprobs"]) == len(line["tokens"])
    assert line["text"] == bytes(line["tokens"]).decode(errors="replace")
    assert line["reason"] == "max_tokens"
  assert found[0]["tokens"] != found[1]["tokens"]  # each has another seed
  assert f"prefill {sum(map(len, texts))} tokens, " in ended.stderr
  assert " compiled in " in ended.stderr


def test_default_is_sampling_and_temperature_0_is_greedy(workdir, launch):
  """Greedy texts do not depend on the seed, sampled ones do."""
  def tokens(*flags):
    ended = launch(
      "generate", f"--workdir={workdir}", "--prompt=def ", "--prompt=def ",
      "--json", "--max_tokens=12", *flags, *SETTINGS,
    )
    assert ended.returncode == 0, ended.stderr
    return [json.loads(line)["tokens"] for line in ended.stdout.splitlines()]

  sampled = tokens()
  assert sampled[0] != sampled[1]  # the second prompt has the next seed
  assert sampled == tokens("--temperature=0.8", "--top_p=0.95")
  greedy = tokens("--temperature=0")
  assert greedy[0] == greedy[1] == tokens("--temperature=0", "--seed=7")[0]


def test_prompt_without_room_is_an_error(workdir, launch):
  ended = launch(
    "generate", f"--workdir={workdir}", "--prompt=a", f"--prompt={24 * 'a'}",
    *SETTINGS,
  )
  assert ended.returncode == 2
  assert ended.stderr.splitlines()[-1] == (
    "error: prompt 2: the prompt has 24 tokens, which leaves no room in "
    "config.inference.context=24"
  )


def test_interrupted_text_is_kept_and_marked(
  workdir, launch
):
  ended = launch(
    "generate", f"--workdir={workdir}", "--prompt=a", "--max_tokens=8000",
    "--cpu_devices=1", "--config.inference.context=8192",
    "--config.inference.batch=1", interrupt=True,
  )
  assert ended.returncode == 130
  assert 0 < len(ended.stdout.strip()) < 8000
  assert "interrupted: 0 of 1 prompts were finished" in ended.stderr
  assert "prefill 1 tokens, " in ended.stderr


@pytest.mark.parametrize(
  "files", ["d/*", "*/d/*"]  # of the database, and of its arrays
)
def test_damaged_checkpoint_is_a_one_line_error(files, workdir, tmp_path):
  shutil.copytree(workdir, tmp_path / "run")
  for path in (tmp_path / "run/checkpoints/0/params").glob(files):
    os.truncate(path, 20)
  experiment = experiments.from_folder(workdir, {"tensor": 1})
  with pytest.raises(ValueError, match="checkpoints/0 is damaged: ") as error:
    export.read_params(experiment, tmp_path / "run")
  assert "Requested byte range" in str(error.value)
  assert "\n" not in str(error.value)


@pytest.mark.parametrize("arguments", [
  ("evaluate",), ("generate", "--prompt=a"),
])
def test_step_selects_the_checkpoint(arguments, workdir, launch):
  """The run has a checkpoint of step 0 only."""
  ended = launch(*arguments, f"--workdir={workdir}", "--step=7")
  assert ended.returncode == 2
  assert "error: no checkpoint of step 7 in " in ended.stderr
