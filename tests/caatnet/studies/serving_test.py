"""The study of serving: a simulated server against a published log."""

import gzip
import json
import re

import numpy as np
import pytest

from caatnet.serving.engine.times import (
  AllReduces,
  AttentionTimes,
  Profile,
  Roofline,
)
from caatnet.show import render
from caatnet.studies.serving import report, study, vllm_logs
from caatnet.studies.serving import vllm_log as of_log
from configs.serving import vllm_log
from parallel.plans.hardware.devices import H100
from parallel.plans.network import inference
from parallel.plans.network.inference import ModelStep
from parallel.plans.workload import Transformer

CONFIG = vllm_log.get_config().to_dict() | {"change": 0.0}


@pytest.fixture(scope="module")
def result():
  return study.run(CONFIG)


def test_simulation_reproduces_the_log(result, capsys):
  """Fits nothing; each figure is within the tolerance."""
  for row in result["rows"]:
    assert abs(row["error"]) <= 0.004, row["name"]
    assert not row["missed"]
  made = report.report(result)
  render.show(made)
  assert "TTFT P95" in capsys.readouterr().out
  times, *ours = zip(*result["series"], strict=True)
  log, labels = result["log_series"], []
  for panel, values, name in zip(
    made.figure().panels, ours, ("running", "waiting", "kv_cache_pct"),
    strict=True,
  ):
    labels.append(panel.axes[1].label)
    assert [(mark.x, mark.y) for mark in panel.marks] == [
      (log["t"], log[name]), (times, values)
    ]
  assert labels == ["running requests", "waiting requests", "used pages (%)"]


@pytest.mark.parametrize(
  "log", [name for name in vllm_logs.INCLUDED_LOGS if name != CONFIG["log"]]
)
def test_simulation_holds_on_logs_that_no_rule_was_found_with(log):
  """Another GPU, 128 slots, two tensor ranks: within 5%."""
  found = study.run(CONFIG | {"log": log, "tolerance": 0.05})
  errors = {row["name"]: row["error"] for row in found["rows"]}
  for name in ("mean", "P50", "P90"):
    assert abs(errors[f"TTFT {name}"]) < 0.05, errors
    assert abs(errors[f"TPOT {name}"]) < 0.05, errors
  text = "\n".join(map(str, report.report(found).parts))
  two = "2 ring all-reduces of a layer at 16 GB/s and 20 us"
  assert (two in text) == (found["assumptions"]["ranks"] == 2)


def test_pages_equal_the_log_before_any_request_ends(result):
  """In the third second, 22 requests use 1,667 pages: equal within five."""
  series, log = np.array(result["series"]), result["log_series"]
  third = series[(series[:, 1] == log["running"][2]) & (series[:, 0] < 5)]
  assert np.any(np.abs(third[:, 3] - log["kv_cache_pct"][2]) < 0.2)


def test_tail_latencies_miss_without_shared_prefixes(result):
  """Marks each figure beyond the tolerance, and states no untested cause."""
  found = study.run(CONFIG | {"prefixes": "none"})
  assert result["counts"]["shared_pages"] > found["counts"]["shared_pages"] == 0
  missed = {row["name"] for row in found["rows"] if row["missed"]}
  assert missed == {"TTFT P95", "TPOT P90", "TPOT P95"}
  for row in found["rows"]:
    assert bool(row["missed"]) == (abs(row["error"]) > CONFIG["tolerance"])
  # An error of communication has no other text than any other error.
  assert {row["missed"] for row in found["rows"]} == {
    "", f"by more than {CONFIG['tolerance']:.1%}"
  }


def test_prompt_tokens_of_a_file_define_shared_pages(tmp_path):
  """Two prompts share pages; a workload of another log is refused."""
  log = vllm_logs.load(CONFIG["log"])
  file = tmp_path / "prompts.jsonl"
  prompts = vllm_logs.prompts(log, "none", 40)
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


@pytest.mark.parametrize("key", ["log", "profile"])
@pytest.mark.parametrize("value", ["absent", __file__, ""])
def test_folders_that_do_not_exist_are_refused(key, value):
  if (key, value) == ("profile", ""):
    return  # the log's
  with pytest.raises(ValueError, match=rf"config\.{key}='{value}' (must|is)"):
    study.run(CONFIG | {key: value})


def test_cache_that_is_too_small_for_a_request_is_refused():
  """Without a first token, latencies would be NaN."""
  config = CONFIG | {"server": CONFIG["server"] | {"pages": 100}}
  with pytest.raises(ValueError, match=r"config\.server\.pages=100 must"):
    study.run(config)


def test_changes_are_those_of_other_keys():
  """Each row of the sensitivity has the setting of a config with one key.

  Times of steps, and all-reduces of several ranks that take none, have no key.
  """
  config = CONFIG | {"log": "rtxpro6000_qwen3_32b"}
  base = of_log.simulation_setup(config)
  pages = base.server["pages"]

  def fields(setting):
    return vars(setting) | {"log": setting.log.name}

  def keys(**changed):
    server = CONFIG["server"] | changed.pop("server", {})
    return fields(
      of_log.simulation_setup(config | {"server": server} | changed)
    )

  more, fewer = round(1.1 * pages), round(0.9 * pages)
  expected = {
    f"10% more pages ({more:,})": keys(server={"pages": more}),
    f"10% fewer pages ({fewer:,})": keys(server={"pages": fewer}),
    "steps take 10% longer": fields(base) | {"scale": 1.1},
    "steps take 10% less": fields(base) | {"scale": 0.9},
    "each step waits for the one before": keys(server={"steps_ahead": 1}),
    "the first chunk must fit, no more": keys(server={"whole_prompt": False}),
    "no page is found": keys(server={"reuse": False}),
    "no prompts begin alike": keys(prefixes="none"),
    "attention by the mean context": keys(skew=0.0),
    "all-reduces take no time": fields(base) | {"all_reduces": None},
  }
  found = of_log._changes(base, 0.1, skew=0.5)
  assert {label: fields(changed) for label, changed in found} == expected
  without = of_log._changes(base, 0.1, skew=0.0)
  assert {*expected} - {label for label, _ in without} == {
    "attention by the mean context"
  }


def test_errors_of_changes_are_relative_to_the_log():
  """More pages than any request needs have no effect; times have one."""
  found = study.run(CONFIG | {"num_requests": 8, "change": 0.1})
  usual = {row["name"]: row["error"] for row in found["rows"]}
  rows = {row["changed"]: row["errors"] for row in found["sensitivity"]}
  (more,) = (errors for label, errors in rows.items() if "more pages" in label)
  assert more == usual
  for name, error in usual.items():
    less, longer = (
      rows[f"steps take 10% {word}"][name] for word in ("less", "longer")
    )
    assert less < error < longer


def test_pages_are_those_of_vllm():
  """The running requests of the log held 2,587 pages and the null page."""
  log = vllm_logs.load("rtx4090_llama31_8b")
  assert vllm_logs.num_pages(log, vllm_logs.MODELS[log.model], 1, 16) == 2588


def test_two_ranks_share_weights_and_heads_of_pages():
  """Qwen3-32B has 32,762,123,264 parameters, in bfloat16.

  A rank has half of them, and four of eight key-value heads in each page; 90%
  of its 96 GiB are used.
  """
  log = vllm_logs.load("rtxpro6000_qwen3_32b")
  page_bytes = 16 * 64 * 2 * 4 * 128 * 2
  assert vllm_logs.num_pages(log, vllm_logs.MODELS[log.model], 2, 16) == (
    (0.9 * 96 * 2**30 - 32_762_123_264) // page_bytes
  )


def _copy(tmp_path):
  """Copies an included log to a folder, uncompressed as it was published."""
  source = vllm_logs.load(CONFIG["log"]).folder
  for path in source.rglob("*"):
    target = tmp_path / path.relative_to(source)
    if path.is_dir():
      target.mkdir()
    elif path.suffix == ".gz":
      target.with_suffix("").write_bytes(gzip.decompress(path.read_bytes()))
    else:
      target.write_bytes(path.read_bytes())
  return tmp_path


def test_log_of_a_folder_equals_the_included_one(tmp_path):
  folder = _copy(tmp_path)
  config = vllm_log.get_config("test").to_dict()
  ours, theirs = study.run(config | {"log": str(folder)}), study.run(config)
  assert ours["rows"] == theirs["rows"]
  assert ours["series"] == theirs["series"]


@pytest.mark.parametrize(("file", "old", "new", "message"), [
  ("requests.jsonl", '"queued_ts"', '"queued"', "line 1: queued_ts is missing"),
  ("requests.jsonl", '"input_toks": 2358', '"input_toks": NaN',
   "line 1: input_toks=NaN must be a"),
  ("timeseries.csv", "running", "runing", "line 1: column running is missing"),
  ("timeseries.csv", "prompt_throughput", "preempted", ""),
  ("config.json", '"tp_size": 1', '"tp_size": 1.5',
   "config.json: tp_size=1.5 must be a valid integer"),
  ("config.json", "meta-llama/Llama-3.1-8B", "other/model",
   "other/model are not known; set config.model.path to the model's published"),
  ("config.json", '"nodes": [', '"nodes": [], "rest": [',
   "nodes must be a list of one: one engine is simulated"),
  ("profile/dense.csv", "gate_up_proj", "experts",
   "the difference: experts, gate_up_proj"),
  ("profile/attention.csv", "kv_decode", "kv", "kv_decode is missing"),
  ("profile/attention.csv", "0,0,1,16,", "0,0,1,-16,",
   'attention.csv: line 2: kv_decode="-16" must be greater than'),
  ("profile/dense.csv", "act_fn,1,2.592", "act_fn,1,nan",
   'line 2: time_us="nan" must be a finite number'),
  ("profile/meta.yaml", "skew_fit:", "skew_fit: 3\nrest:",
   "meta.yaml: skew_fit=3 must be"),
  ("profile/meta.yaml", "profiler_version", ": {", "profile/meta.yaml: "),
])
def test_damaged_file_of_a_log_is_named_in_one_line(
  tmp_path, file, old, new, message
):
  folder = _copy(tmp_path)
  text = (folder / file).read_text()
  assert old in text
  (folder / file).write_text(text.replace(old, new))
  config = vllm_log.get_config("test").to_dict() | {"log": str(folder)}
  if not message:
    study.run(config)  # a column that is not read
    return
  with pytest.raises(ValueError, match=re.escape(message)) as error:
    study.run(config)
  assert "\n" not in str(error.value)


def test_profile_reproduces_its_measured_points():
  """On a grid point, a step of one chunk is the sum of its operations."""
  log = vllm_logs.load("rtx4090_llama31_8b")
  model, folder = vllm_logs.MODELS[log.model], log.folder / "profile"
  profile = vllm_logs.read_profile(folder, model)
  point = {
    (512, 1024, 8, 256): 3.0, (0, 0, 8, 256): 1.0, (512, 1024, 0, 0): 2.0
  }
  attention = AttentionTimes(point)
  assert [attention.time(*p) for p in point] == [3.0, 1.0, 2.0]
  middle = AttentionTimes({(0, 0, 1, 16): 1.0, (0, 0, 1, 32): 2.0})
  assert middle.time(0, 0, 1, 24) == 1.5
  one = profile.step_s(np.full(8, 256), [(1024, 512)])
  assert one > profile.step_s(np.full(8, 256), []) > 0
  twice = vllm_logs.read_profile(folder, model, scale=2.0)
  assert twice.step_s(np.full(8, 256), []) == pytest.approx(
    2 * profile.step_s(np.full(8, 256), [])
  )


def test_skew_places_unequal_contexts_between_mean_and_largest():
  """All-reduces add their time for all tokens of a step."""
  attention = AttentionTimes({
    (0, 0, 2, 16): 1.0, (0, 0, 2, 32): 3.0, (64, 0, 2, 16): 5.0,
    (64, 0, 2, 32): 9.0, (64, 0, 0, 0): 4.0,
  })
  free = [(np.array([0.0, 1e6]), np.zeros(2))]

  def step_s(skew, contexts, chunks, all_reduces=None):
    profile = Profile(
      3, free, free, free, attention, skew=skew, all_reduces=all_reduces
    )
    return profile.step_s(np.array(contexts), chunks)

  mean, largest = 3 * 2.0, 3 * 3.0  # contexts 24 and 32 in 3 layers
  assert step_s(0.0, [16, 32], []) == mean
  assert step_s(1.0, [16, 32], []) == largest
  assert step_s(0.25, [16, 32], []) == mean + 0.25 * (largest - mean)
  assert step_s(0.25, [24, 24], []) == mean
  assert step_s(0.25, [16, 32], [(0, 64)]) == 3 * (7.0 + 0.25 * 2.0)
  pair = AllReduces(2, token_bytes=4, bandwidth=2.0, latency_s=1.0)
  ours = step_s(0.0, [16, 32], [(0, 64)], pair)
  # In each layer two all-reduces of 66 tokens, each two messages of a half.
  assert ours == 3 * (7.0 + 2 * 2 * (1.0 + 66 * 4 / 2 / 2.0))


def test_roofline_of_equal_sequences_equals_a_decode_step():
  """Compares with the bounds of a decode step of one context length."""
  model = Transformer(32000, 4096, 32, 32, 32, 11008)
  machine = inference.machine("gpu:h100:1x8")
  ours = Roofline(model, H100, machine, p=0.5).step_s(np.full(16, 2048), [])
  theirs = inference.step_time_bounds(
    model, ModelStep(16, 1, 2048), machine, [0.5] * 64
  )
  assert ours == pytest.approx(theirs.with_latency.least)
