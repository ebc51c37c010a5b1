"""The registry of studies."""

import pytest

from caatnet.studies import registry


def test_unknown_study_is_refused_with_the_known_ones():
  for config in ({}, {"study": "flow"}):
    with pytest.raises(ValueError, match=(
      rf"^config\.study={config.get('study')!r} must be one of alignment, "
    )):
      registry.find(config)
  assert registry.find({"study": "datacentre"}).write_page is not None
