"""Published logs: prompts with their lengths and common prefixes."""

import csv
import dataclasses
import gzip
import json

import numpy as np
import pytest

from caatnet.studies.serving import vllm_logs


@pytest.mark.parametrize("name", vllm_logs.INCLUDED)
def test_prompts_of_a_log_have_its_lengths_and_prefixes(name):
  log = vllm_logs.load(name)
  assert len(log.requests) == 300
  prompts = vllm_logs.prompts(log, "none", 80)
  assert [len(p) for p in prompts] == [
    row["input_tokens"] for row in log.requests[:80]
  ]
  assert {p.dtype.name for p in prompts} == {"int32"}
  drawn = np.concatenate(prompts)
  assert drawn.max() > 2.1e9
  assert len(set(drawn.tolist())) > 0.99 * len(drawn)
  published = vllm_logs.prompts(log, "published", 80)
  text = gzip.decompress((log.folder / "prefixes.csv.gz").read_bytes())
  num_shared = 0
  for row in csv.DictReader(text.decode().splitlines()):
    i, like, count = (int(row[key]) for key in ("request", "like", "tokens"))
    if i < 80:
      num_shared += 1
      assert np.array_equal(published[i][:count], published[like][:count])
      assert published[i][count:].tolist() == prompts[i][count:].tolist()
  assert num_shared


def test_file_of_prompts_must_be_readable(tmp_path):
  log = dataclasses.replace(
    vllm_logs.load("rtx4090_llama31_8b"),
    requests=[{"input_tokens": 2.0}, {"input_tokens": 1.0}],
  )
  path = tmp_path / "prompts.jsonl"
  lines = [{"input_tok_ids": ids} for ids in ([5, 6], [7], [8, 9])]
  path.write_text("".join(json.dumps(line) + "\n" for line in lines))
  found = vllm_logs.prompts(log, str(path))
  assert [x.tolist() for x in found] == [[5, 6], [7]]
  for text in ("{", '{"tokens": [1]}', '{"input_tok_ids": 5}'):
    path.write_text(text)
    with pytest.raises(ValueError, match="is neither published nor none"):
      vllm_logs.prompts(log, str(path))
