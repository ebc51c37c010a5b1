"""`launch.place`, as users run it."""

import json

import pytest

from parallel.plans.hardware import tiers

PLACE = "--config=configs/memory/12b_32k.py"


def test_placement_is_written_and_drawn(launch, tmp_path):
  path, picture = tmp_path / "placement.json", tmp_path / "tiers.png"
  file = tmp_path / "tiers.json"
  file.write_text(tiers.to_json(tiers.HOSTS["two-cxl"]))
  ended = launch(
    "place", f"{PLACE}:7b", "--config.data.seq_len=4096",
    "--config.placement.longest=8192", f"--tiers={file}", f"--output={path}",
    f"--plot={picture}",
  )
  assert ended.returncode == 0, ended.stderr
  assert "predicted, not measured" in ended.stdout.replace("\n", " ")
  result = json.loads(path.read_text())
  rows = {row["policy"]: row for row in result["policies"]}
  best = rows["optimum"]
  assert best["relative"] >= max(
    row["relative"] for row in rows.values() if row["relative"]
  ) * (1 - 1e-6)
  phases = [best[p]["seconds"] for p in ("forward", "backward", "update")]
  assert sum(phases) == pytest.approx(best["step_s"])
  same, slow = (
    next(row for row in result["scanned"] if row["changed"] == changed)
    for changed in ("nothing", "cxl low")
  )
  assert same["speeds"]["interleave"] == rows["interleave"]["relative"]
  assert slow["speeds"]["interleave"] < rows["interleave"]["relative"]
  # A tensor that is forced to another tier never makes the step faster.
  for row in result["tensors"]:
    assert all(x is None or x > -1e-6 for x in row["elsewhere"].values())
  assert picture.stat().st_size > 10_000
  # Over a step: nothing of a step before it and after it; in between, the bytes
  # of the instants.
  start, forward, backward, update = result["timeline"]
  assert start["bytes"] == update["bytes"]
  assert start["seconds"] == 0
  assert update["seconds"] == pytest.approx(best["step_s"])
  for row, instant in (
    (forward, "end of forward"), (backward, "end of backward")
  ):
    for tier, held in row["bytes"].items():
      assert held == pytest.approx(sum(
        one["bytes"] for one in result["occupied"]
        if (one["instant"], one["tier"]) == (instant, tier)
      ), rel=1e-4, abs=1e6)
      assert held >= start["bytes"][tier]


def test_json_is_all_that_is_printed(launch):
  """The solver of whole layers prints a line of its own."""
  ended = launch("place", PLACE, "--tiers=one-cxl", "--json",
                 "--config.data.seq_len=4096")
  assert json.loads(ended.stdout)["whole"]["gap"] >= 0


@pytest.mark.parametrize(("scale", "says"), [
  (1e-9, "the state does not fit"),  # nothing fits
  # Fractions of layers fit, whole ones do not.
  (0.3607, "with whole layers only"),
])
def test_a_host_that_is_too_small_is_reported(launch, tmp_path, scale, says):
  host = tiers.HOSTS["two-cxl"]
  small = host.model_copy(update={"tiers": tuple(
    tier.model_copy(update={
      "capacity_bytes": tier.capacity_bytes.model_copy(update=dict.fromkeys(
        ("value", "low", "high"), scale * tier.capacity_bytes.value
      ))
    }) for tier in host.tiers
  )})
  (tmp_path / "tiers.json").write_text(tiers.to_json(small))
  ended = launch(
    "place", PLACE, f"--tiers={tmp_path / 'tiers.json'}",
    "--config.placement.longest=2048", f"--report={tmp_path / 'page.html'}",
  )
  assert ended.returncode == 0, ended.stderr
  assert says in ended.stdout
  assert (tmp_path / "page.html").stat().st_size > 1000


@pytest.mark.parametrize(("flags", "message"), [
  (["--config=configs/caatnet/tiny.py"], "must be 'placement'; use"),
  ([PLACE, "--tiers={tmp}/no.json"], "No such file"),
  ([PLACE, "--tiers=three-cxl"], "did you mean"),
  ([f"{PLACE}:70b"], "the sizes are 12b, 7b"),
  ([PLACE, "--config.placement.device=h1000"], "config.placement.device="),
  ([PLACE, "--config.placement.policies=('first',)"], "placement.policies="),
  ([PLACE, "--config.placement.fill=0"], "config.placement.fill=0"),
])
def test_bad_input_is_one_line(launch, tmp_path, flags, message):
  ended = launch("place", *(flag.format(tmp=tmp_path) for flag in flags))
  assert ended.returncode == 2
  assert message in ended.stderr
  assert "Traceback" not in ended.stderr
  assert len(ended.stderr.strip().splitlines()) == 1
