"""The study of serving: a simulated server against a published log."""

import json

import numpy as np
import pytest

from caatnet.serving.engine.times import Attention, Roofline
from caatnet.show import render
from caatnet.studies.serving import measured, report, study
from configs.serving import vllm_log
from parallel.hardware.devices import H100
from parallel.network import inference
from parallel.network.inference import Step
from parallel.workload import Transformer

CONFIG = vllm_log.get_config().to_dict() | {"change": 0.0}


@pytest.fixture(scope="module")
def result():
  return study.run(CONFIG)


def test_simulation_reproduces_the_log(result, capsys):
  """Fits nothing; each figure is within the tolerance."""
  for row in result["rows"]:
    assert abs(row["error"]) <= CONFIG["tolerance"], row["name"]
    assert not row["suspected"]
  render.show(report.report(result))
  assert "TTFT P95" in capsys.readouterr().out


def test_pages_equal_the_log_before_any_request_ends(result):
  """In the third second, 22 requests use 1,667 pages: equal within five."""
  series, log = np.array(result["series"]), result["log_series"]
  third = series[(series[:, 1] == log["running"][2]) & (series[:, 0] < 5)]
  assert np.any(np.abs(third[:, 3] - log["kv_cache_pct"][2]) < 0.2)


def test_tail_latencies_miss_without_shared_prefixes(result):
  """Names each missed figure with the suspected rule."""
  found = study.run(CONFIG | {"prefixes": "none"})
  assert result["counts"]["shared_pages"] > found["counts"]["shared_pages"] == 0
  missed = {row["name"] for row in found["rows"] if row["suspected"]}
  assert missed == {"TTFT P95", "TPOT P90", "TPOT P95"}
  for row in found["rows"]:
    assert bool(row["suspected"]) == (abs(row["error"]) > CONFIG["tolerance"])


def test_prompt_tokens_of_a_file_define_shared_pages(tmp_path):
  """Two prompts share pages; a workload of another log is refused."""
  rows = measured.requests()[:40]
  file = tmp_path / "prompts.jsonl"
  prompts = measured.prompts(rows, "none")
  prompts[2][:1024] = prompts[0][:1024]
  file.write_text("".join(
    json.dumps({"input_tok_ids": prompt.tolist()}) + "\n" for prompt in prompts
  ))
  config = vllm_log.get_config("test").to_dict() | {"prefixes": str(file)}
  assert study.run(config)["counts"]["shared_pages"] == 1024 // 16
  file.write_text('{"input_tok_ids": [1, 2]}\n' * 40)
  with pytest.raises(ValueError, match="lengths differ"):
    study.run(config)
  with pytest.raises(ValueError, match=r"config\.prefixes='publisht'"):
    study.run(config | {"prefixes": "publisht"})


def test_profile_reproduces_its_measured_points():
  """On a grid point, a step of one chunk is the sum of its operations."""
  profile = measured.profile()
  point = {
    (512, 1024, 8, 256): 3.0, (0, 0, 8, 256): 1.0, (512, 1024, 0, 0): 2.0
  }
  attention = Attention(point)
  assert [attention.time(*p) for p in point] == [3.0, 1.0, 2.0]
  middle = Attention({(0, 0, 1, 16): 1.0, (0, 0, 1, 32): 2.0})
  assert middle.time(0, 0, 1, 24) == 1.5
  one = profile.step_s(np.full(8, 256), [(1024, 512)])
  assert one > profile.step_s(np.full(8, 256), []) > 0
  assert measured.profile(2.0).step_s(np.full(8, 256), []) == pytest.approx(
    2 * profile.step_s(np.full(8, 256), [])
  )


def test_roofline_of_equal_sequences_equals_a_decode_step():
  """Compares with the bounds of a decode step of one context length."""
  model = Transformer(32000, 4096, 32, 32, 32, 11008)
  machine = inference.machine("gpu:h100:1x8")
  ours = Roofline(model, H100, machine, p=0.5).step_s(np.full(16, 2048), [])
  theirs = inference.bounds(model, Step(16, 1, 2048), machine, [0.5] * 64)
  assert ours == pytest.approx(theirs.with_latency.least)
