"""A config's run over sockets, from its start to its summary."""

import json
import threading

import numpy as np
import pytest

from caatnet.config import federated
from caatnet.config.override import override
from caatnet.federated import report, run
from caatnet.federated.rehearsal import rehearse, rehearse_streamed
from configs.federated import tiny
from parallel.peers.transport.handshake import Security

SECURITY = Security(b"a token of the tests")
SMALL = (
  "model.widths=(4,) model.blocks=1 model.groups=2 federated.clients=1 "
  "federated.per_round=1 federated.uplink=int8 federated.downlink=int4 "
  "federated.proximal=0.1 optimizer.name=adamw optimizer.warmup_steps=0"
)


def test_config_runs_and_its_folder_refuses_another(tmp_path):
  config = override(tiny.get_config("convolutional,test"), SMALL)
  federation = federated.build(config)
  lines = []
  with run.open_service(federation, tmp_path, lines.append) as service:
    service.listen(("127.0.0.1", 0), SECURITY)
    client = threading.Thread(target=run.run_client, daemon=True, args=(
      federation, 0, "{}:{}".format(*service.address), SECURITY
    ))
    client.start()
    service.serve()
    client.join(20.0)
    assert not client.is_alive()
  assert service.state.revision == 3
  assert "3 rounds have ended: revision 3" in run.summary(federation, service)
  num = federation.vectors.num
  records = [
    json.loads(x) for x in (tmp_path / "metrics.jsonl").read_text().splitlines()
  ]
  rows = [r["clients"][0] for r in records]
  for row in rows:
    assert num <= row["payload_up"] < 1.1 * num + 512  # int8, and scales
    assert row["t_tr"] > 0
    assert row["t_v"] > 0
    assert row["t_te"] > 0
  # The first model in float32, then differences in 4 bits.
  assert rows[0]["bytes_down"] > 4 * num
  assert rows[1]["bytes_down"] < num + 1500
  assert records[2]["loss"] < records[0]["loss"]
  cells = report.table(service.rows).cells()
  assert [row[:2] for row in cells] == [[str(k), "0"] for k in range(3)]
  # The same bits with a simulated clock, and an evaluation after each round.
  seen = []
  cell = federated.build(override(config, f"{SMALL} federated.links=('wifi',)"))
  measured = (
    [federation.trainer(0)], [{"t_tr": 5.0, "t_a": 0.5}], 0.0,
    lambda params: {"loss": float(len(seen.append(params.copy()) or seen))},
  )
  rows = rehearse(cell, *measured)
  np.testing.assert_array_equal(seen[-1], service.state.params)
  assert [row["loss"] for row in rows] == [1.0, 2.0, 3.0]
  first, second, last = (row["time_s"] for row in rows)
  assert 5.0 < last - second < 6.0 < first + 1.0
  assert rows[-1]["bytes_up"] == 3 * rows[0]["bytes_up"]
  assert rows[0]["bytes_down"] > 2 * (
    rows[1]["bytes_down"] - rows[0]["bytes_down"]
  )
  # One streamed fragment is a round.
  for row, one in zip(rows, rehearse_streamed(cell, *measured, 1), strict=True):
    assert one == row | {
      "time_s": pytest.approx(row["time_s"], abs=0.02),
      "loss": row["loss"] + 3,
    }
  np.testing.assert_array_equal(seen[:3], seen[3:])
  # Updates of one client change nothing, whenever they are sent and merged. The
  # second fragment of the server is the client's at the end of a round.
  exact = federated.build(override(config, (
    f"{SMALL} federated.links=('wifi',) federated.uplink=none "
    "federated.downlink=none"
  )))
  seen.clear()
  rehearse(exact, *measured)
  rehearse_streamed(exact, *measured, 2)
  half = num // 2
  for plain, streamed in zip(seen[:3], seen[3:], strict=True):
    np.testing.assert_allclose(streamed[half:], plain[half:], atol=1e-6)
    assert np.abs(streamed[:half] - plain[:half]).max() > 1e-4
  # Each fragment is merged in half of the time of the whole: 4 s, for which the
  # next piece of 2.5 s waits.
  slow = rehearse_streamed(
    exact, measured[0], [{"t_tr": 5.0, "t_a": 8.0}], *measured[2:], 2
  )
  assert 6.5 <= slow[2]["time_s"] - slow[1]["time_s"] < 9
  for run_of in (rehearse, lambda *given: rehearse_streamed(*given, 1)):
    with pytest.raises(ValueError, match=r"federated.links=\(\) must name"):
      run_of(federation, [], [], 0.0, dict)
  with pytest.raises(ValueError, match="local_steps=2 must be a multiple of 3"):
    rehearse_streamed(cell, [], [], 0.0, dict, 3)
  late = federated.build(override(config, (
    f"{SMALL} federated.links=('wifi',) federated.stragglers=late"
  )))
  with pytest.raises(ValueError, match="streamed rounds, which wait for all 1"):
    rehearse_streamed(late, [], [], 0.0, dict, 1)

  medians = report.table(service.rows * 20).cells()
  assert [row[0] for row in medians] == ["0"]

  with pytest.raises(ValueError, match="--client=1 must be at most 0"):
    run.run_client(federation, 1, "127.0.0.1:1", SECURITY)
  other = federated.build(override(config, "federated.local_steps=3"))
  again = run.open_service(other, tmp_path)
  with pytest.raises(ValueError, match=r"federated\.local_steps=2, but"):
    again.__enter__()
  # The rows of an ended run are those of its rounds.
  with run.open_service(federation, tmp_path, lines.append) as ended:
    assert ended.rows == service.rows
    assert ended.state.finished


@pytest.mark.parametrize("weights", ["examples", "equal"])
def test_one_streamed_fragment_of_unequal_clients_is_a_round(weights):
  federation = federated.build(override(
    tiny.get_config("convolutional,test"), (
      f"{SMALL} federated.clients=2 federated.per_round=2 "
      f"federated.links=('wifi',) federated.weights={weights} "
      "federated.split=dirichlet federated.alpha=0.3"
    ),
  ))
  trainers = [federation.trainer(k) for k in range(2)]
  assert trainers[0].examples != trainers[1].examples
  seen = []
  measured = trainers, [{"t_tr": 5.0}, {"t_tr": 6.0}], 0.0, (
    lambda params: {"loss": float(len(seen.append(params.copy()) or seen))}
  )
  rows = rehearse(federation, *measured)
  streamed = rehearse_streamed(federation, *measured, 1)
  assert [r["bytes_up"] for r in rows] == [r["bytes_up"] for r in streamed]
  np.testing.assert_allclose(seen[:3], seen[3:], atol=1e-6)


def test_run_without_a_round_leaves_no_config_in_a_new_folder(tmp_path):
  for changes in ("", " federated.local_steps=3"):
    config = override(tiny.get_config("convolutional,test"), SMALL + changes)
    with run.open_service(federated.build(config), tmp_path, [].append):
      assert (tmp_path / "config.json").exists()
    assert not (tmp_path / "config.json").exists()
