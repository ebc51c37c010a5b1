"""The registry of studies."""

import pathlib

import pytest

from caatnet.studies import registry


def test_unknown_study_is_refused_with_the_known_ones():
  for config in ({}, {"study": "flow"}):
    with pytest.raises(ValueError, match=(
      rf"^config\.study={config.get('study')!r} must be one of alignment, "
    )):
      registry.find(config)
  assert registry.find({"study": "datacentre"}).write_page is not None


def test_all_files_of_keys_are_imported():
  root = pathlib.Path(registry.__file__).parent
  found = {
    ".".join(path.relative_to(root).with_suffix("").parts)
    for path in root.glob("*/*keys.py")
  }
  assert {*registry.KEY_MODULES} == found
