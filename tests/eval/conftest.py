"""Settings before datasets loads: no network, no files in the home folder."""

import os
import tempfile

_FOLDER = tempfile.TemporaryDirectory(prefix="datasets_")  # removed at exit
os.environ |= {
  "HF_HOME": _FOLDER.name, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1",
}
