"""The published log: prompts with its lengths."""

import json

import numpy as np
import pytest

from caatnet.studies.serving import measured


def test_prompts_of_the_log_have_its_lengths():
  rows = measured.requests()[:20]
  prompts = measured.prompts(rows, "none")
  assert [len(p) for p in prompts] == [row["input_tokens"] for row in rows]
  assert {p.dtype.name for p in prompts} == {"int32"}
  drawn = np.concatenate(prompts)
  assert drawn.max() > 2.1e9
  assert len(set(drawn.tolist())) > 0.99 * len(drawn)
  published = measured.prompts(rows, "published")
  for row in measured._rows("prefixes"):
    i, like, count = (int(row[key]) for key in ("request", "like", "tokens"))
    if i < 20:
      assert np.array_equal(published[i][:count], published[like][:count])
      assert published[i][count:].tolist() == prompts[i][count:].tolist()
  assert measured.profile().num_layers == 32  # of Llama-3.1-8B


def test_file_of_prompts_must_be_readable(tmp_path):
  rows = [{"input_tokens": 2.0}, {"input_tokens": 1.0}]
  path = tmp_path / "prompts.jsonl"
  lines = [{"input_tok_ids": ids} for ids in ([5, 6], [7], [8, 9])]
  path.write_text("".join(json.dumps(line) + "\n" for line in lines))
  found = measured.prompts(rows, str(path))
  assert [x.tolist() for x in found] == [[5, 6], [7]]
  for text in ("{", '{"tokens": [1]}', '{"input_tok_ids": 5}'):
    path.write_text(text)
    with pytest.raises(ValueError, match="is neither published nor none"):
      measured.prompts(rows, str(path))
