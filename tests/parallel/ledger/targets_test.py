"""Names of targets that are refused before anything is described."""

import pytest

from parallel.ledger import targets


@pytest.mark.parametrize(("name", "message"), [
  ("v5p", "is not tpu:GENERATION:TOPOLOGY"),
  ("tpu:v9:2x2", "no TPU generation 'v9'; known: v4, v5e, v5p, v6e, tpu7x"),
  ("tpu:v5p:big", "'big' is no topology"),
  ("tpu:v5e:2x2:0", "'0' is no number of slices, 1 to 9999"),
  ("tpu:v5e:2x2x2", "no v5e slice 2x2x2: its slices have 2 dims"),
  ("gpu:h300:1x8", "no GPU 'h300'; known: a100, a100-pcie, h100, h200, b200"),
  ("gpu:h100:1x9", "'1x9' is not NODESxGPUS with at most 8 GPUs in a node"),
  ("gpu:h100:8", "'8' is not NODESxGPUS"),
  ("gpu:a100-pcie:2x8", "at most 1 nodes of a100-pcie"),
])
def test_name_of_no_target_is_refused(name, message):
  with pytest.raises(ValueError) as error:
    targets.resolve(name)
  assert str(error.value).startswith(f"--target={name}") or name == "v5p"
  assert message in str(error.value)
