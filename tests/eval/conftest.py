"""No network, and no files in the home folder; set before datasets loads."""

import os
import tempfile

_FOLDER = tempfile.TemporaryDirectory(prefix="datasets_")  # goes at exit
os.environ |= {
  "HF_HOME": _FOLDER.name, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1",
}
