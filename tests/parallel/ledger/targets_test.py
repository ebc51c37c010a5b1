"""Names of targets that are refused before anything is described."""

import pytest

from parallel.ledger import targets


@pytest.mark.parametrize(("name", "message"), [
  ("v5p", "must have the form tpu:GENERATION:TOPOLOGY"),
  ("tpu:v9:2x2", "the TPU generation 'v9' is unknown; use one of v4, v5e,"),
  ("tpu:v5p:big", "the topology 'big' must have the form of 4x4x4"),
  ("tpu:v5e:2x2:0", "the number of slices '0' must be an integer from 1 to"),
  ("tpu:v5e:2x2x2", "v5e has no slice 2x2x2: its slices have 2 dims"),
  ("gpu:h300:1x8", "the GPU 'h300' is unknown; use one of a100, a100-pcie,"),
  ("gpu:h100:1x9", "'1x9' must be NODESxGPUS with at most 8 GPUs per node"),
  ("gpu:h100:8", "'8' must be NODESxGPUS"),
  ("gpu:a100-pcie:2x8", "a100-pcie supports at most 1"),
])
def test_name_of_no_target_is_refused(name, message):
  with pytest.raises(ValueError) as error:
    targets.resolve(name)
  assert str(error.value).startswith(f"--target={name}") or name == "v5p"
  assert message in str(error.value)
