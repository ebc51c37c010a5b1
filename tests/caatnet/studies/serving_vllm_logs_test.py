"""Published logs: prompts, and fields that are modelled or refused by name."""

import csv
import dataclasses
import gzip
import json
import pathlib
import shutil

import numpy as np
import pytest

from caatnet.schema.tree import defaults
from caatnet.studies.serving import vllm_fields, vllm_log, vllm_logs
from caatnet.studies.serving.vllm_log_keys import VLLMLog
from parallel.base import schema

CONFIG = defaults(VLLMLog).to_dict()
LLAMA = {  # published
  "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096,
  "intermediate_size": 14336, "num_hidden_layers": 32,
  "num_attention_heads": 32, "num_key_value_heads": 8,
}


@pytest.mark.parametrize("name", vllm_logs.INCLUDED_LOGS)
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
    with pytest.raises(ValueError, match="is neither auto, published"):
      vllm_logs.prompts(log, str(path))


@pytest.mark.parametrize("name", vllm_fields._ACCEPTED_BY_FIELD)
def test_values_that_are_not_simulated_are_refused_at_any_depth(name):
  values, reason = vllm_fields._ACCEPTED_BY_FIELD[name]
  for value in (None, *values):
    vllm_fields.check({"a": [{name: value}]})
  for other in (7, {"kv": 1}):
    with pytest.raises(ValueError, match=rf"^a\[0\]\.{name}=.*{reason}"):
      vllm_fields.check({"a": [{name: other}]})


def _log(folder):
  """Copies an included log, uncompressed, to where LLMServingSim has it."""
  log = vllm_logs.load("rtxpro6000_llama31_8b")
  (folder / "vllm").mkdir(parents=True)
  for name in ("../config.json", "meta.json", "requests.jsonl",
               "timeseries.csv"):
    path = vllm_logs._find(log.folder, pathlib.Path(name).name)
    (folder / "vllm" / name).write_bytes(schema.read_bytes(path))
  return log


@pytest.mark.parametrize(("file", "old", "new", "message"), [
  ("config.json", '"num_instances": 1', '"num_instances": 2',
   r"nodes\[0\].num_instances=2 is not simulated, only 1: one engine"),
  ("config.json", '"pd_type": null\n                }', '"a": 0}, {}',
   r"nodes\[0\].instances must be a list of one: one engine"),
  ("config.json", '"pd_type": null', '"ep_size": 2, "dp_group": "A"',
   "ep_size=2 is not simulated, only 1: experts"),
  ("config.json", '"pd_type": null', '"spare_size": 2',
   "spare_size=2 is not known to the simulation"),
  ("config.json", '"num_npus": 1', '"num_npus": 4',
   "tp_size=1, num_npus=4 in .* must be equal"),
  ("config.json", '"num_npus": 1,', "", None),
  ("vllm/meta.json", '"tensor_parallel_size": 1', '"tensor_parallel_size": 2',
   "tp_size=1, tensor_parallel_size=2, num_npus=1 in .* must be equal"),
  ("vllm/meta.json", '"num_requests"', '"world_size_across_dp": 2, "seed"',
   "num_npus=1, world_size_across_dp=2 in .* must be equal"),
  ("vllm/meta.json", '"tick_seconds": 1.0', '"resolved_config": '
   '{"a_config": {"b": "B(c=2)"}, "instance_id": "a1"}', None),
  ("vllm/meta.json", '"tick_seconds": 1.0', '"resolved_config": '
   '{"a_config": "ParallelConfig(data_parallel_size=2)"}',
   "resolved_config.a_config=.* is an object as text"),
  ("vllm/meta.json", '"tick_seconds": 1.0', '"resolved_config": '
   '{"parallel_config": {"data_parallel_size_local": 2}}',
   "data_parallel_size_local=2 is not simulated, only 1: one engine"),
  ("vllm/meta.json", '"data_parallel_size": 1', '"data_parallel_size": 2',
   "engine_kwargs.data_parallel_size=2 is not simulated, only 1: one engine"),
  ("vllm/meta.json", '"tick_seconds"', '"kv_cache": {"x": 3}, "y"', "^.*y=1.0"),
  ("vllm/meta.json", '"tick_seconds"', '"model_type": "llama", "y"',
   'model_type="llama" is not known'),
  ("vllm/requests.jsonl", '"bench-1"', '"bench-0"', "a request_id is listed"),
  ("vllm/requests.jsonl", '"bench-1"', '"bench-1", "data_parallel_rank": 1',
   r"\[1\].data_parallel_rank=1 is not simulated"),
  ("vllm/requests.jsonl", '"bench-1"', '"bench-1", "instance_id": 1',
   r"\[1\].instance_id=1 is not known"),
  ("vllm/timeseries.csv", "gen_throughput", "engine",
   'engine="166.0" is not known'),
  ("vllm/timeseries.csv", "\n2.0,", "\n1.0,", "a time t is listed twice"),
])
def test_log_of_a_server_that_is_not_modelled_is_refused(
  tmp_path, file, old, new, message
):
  _log(tmp_path)
  text = (tmp_path / file).read_text()
  assert text.count(old) == 1
  (tmp_path / file).write_text(text.replace(old, new))
  if message is None:
    vllm_logs.load(str(tmp_path))
    return
  with pytest.raises(ValueError, match=message) as error:
    vllm_logs.load(str(tmp_path))
  assert "\n" not in str(error.value)


def test_a_folder_of_the_published_repository_needs_one_key(tmp_path):
  """Profile, workload and sizes of a model that is not known are found."""
  folder = tmp_path / "bench/examples/DEVICE/model"
  log = _log(folder)
  for file in (folder / "config.json", folder / "vllm" / "meta.json"):
    text = file.read_text().replace(log.model, "other/model")
    file.write_text(text.replace("RTXPRO6000", "DEVICE"))
  profile = tmp_path / "profiler/perf/DEVICE/other/model/bf16"
  shutil.copytree(log.folder / "profile", profile / "tp1")
  (profile / "tp1/meta.yaml").rename(profile / "meta.yaml")
  sizes = tmp_path / "configs/model/other/model.json"
  sizes.parent.mkdir(parents=True)
  sizes.write_text(json.dumps(LLAMA))
  config = CONFIG | {"num_requests": 60, "change": 0.0}
  without = vllm_log.run(config | {"log": str(folder)})
  workload = tmp_path / "workloads/sharegpt-llama-3.1-8b-300-sps10.jsonl"
  workload.parent.mkdir()
  workload.write_text("".join(
    json.dumps({"input_tok_ids": tokens.tolist()}) + "\n"
    for tokens in vllm_logs.prompts(log, "published")
  ))
  found = vllm_log.run(config | {"log": str(folder)})
  expected = vllm_log.run(config | {"log": "rtxpro6000_llama31_8b"})
  assert without["assumptions"]["prefixes"] == "none"
  assert found["assumptions"]["prefixes"] == str(workload)
  assert expected["assumptions"]["prefixes"] == "published"
  assert found["rows"] == expected["rows"]
  assert found["counts"] == expected["counts"] != without["counts"]
  config["profile"] = str(profile / "tp1")
  with pytest.raises(ValueError, match=r"tp_degrees=\[1, 2\] does not contain"):
    vllm_log.run(config | {"log": str(folder), "ranks": 4})
  sizes.write_text(json.dumps(LLAMA | {"hidden_size": 2048}))
  with pytest.raises(ValueError, match="has other sizes than the log"):
    vllm_log.run(config | {"log": str(folder)})


def test_settings_of_vllm_are_preferred_and_suffice(tmp_path):
  """Pages, their size, limits and reuse; a link only of several ranks."""
  log = _log(tmp_path)
  meta = json.loads((tmp_path / "vllm/meta.json").read_text())
  meta["kv_cache"] = {"num_gpu_blocks": 500, "block_size": 32,
                      "enable_prefix_caching": False}
  (tmp_path / "vllm/meta.json").write_text(json.dumps(meta))
  config = CONFIG | {"profile": str(log.folder / "profile")}
  for _ in "simulator", "model":  # whose config.json
    base = vllm_log.simulation_setup(config | {"log": str(tmp_path)})
    assert base.model == vllm_logs.MODELS[log.model]
    assert base.server["pages"] * base.server["page_size"] == 16000
    assert (base.server["slots"], base.server["reuse"]) == (128, False)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "vllm/meta.json").write_text(
      json.dumps(meta).replace(log.model, "other/model")
    )
  with pytest.raises(ValueError, match="has no link between its 2 ranks"):
    vllm_log.simulation_setup(
      config
      | {
        "log": str(tmp_path), "ranks": 2,
        "server": (CONFIG["server"] | {"pages": 500}),
      }
    )


@pytest.mark.parametrize(("change", "message"), [
  ({}, None), ({"model_type": "mixtral"}, "model_type='mixtral' must be one"),
  ({"model_type": "mistral", "sliding_window": 64}, "sliding_window=64 is not"),
  ({"quantization_config": {"bits": 4}}, "quantization_config="),
])
def test_sizes_are_those_of_the_published_file(tmp_path, change, message):
  log = vllm_logs.load("rtxpro6000_llama31_8b")
  (tmp_path / "config.json").write_text(json.dumps(LLAMA | change))
  sizes = CONFIG["model"] | {"path": str(tmp_path)}
  if message is None:
    assert vllm_logs.model_of(log, sizes) == vllm_logs.MODELS[log.model]
    assert vllm_logs.model_of(log, sizes | {"num_layers": 3}).num_layers == 3
    return
  with pytest.raises(ValueError, match=message):
    vllm_logs.model_of(log, sizes)
