"""Imports are followed from a source file to test files."""

import pytest

from tests.mutation.imports import reaching

FILES = {
  "parallel/a.py": "",
  "parallel/b.py": "from parallel import a",
  "caatnet/c.py": "def f():\n  import parallel.b",
  "caatnet/d.py": "",
  "parallel/peer.py": "",
  "caatnet/e.py": "KIND, NAME = 'parallel.peer:Peer', 'f.py'",
  "caatnet/f.py": "",
  "tests/caatnet/e_test.py": "from caatnet import e",
  "tests/parallel/a_test.py": "from parallel.a import x",
  "tests/caatnet/c_test.py": "from caatnet import c",
  "tests/caatnet/d_test.py": "from caatnet import d",
  "tests/tpu/e_test.py": "from parallel import a",
}


@pytest.mark.parametrize(("file", "tests"), [
  ("parallel/a.py", ["tests/parallel/a_test.py", "tests/caatnet/c_test.py"]),
  ("parallel/b.py", ["tests/caatnet/c_test.py"]),
  ("caatnet/d.py", ["tests/caatnet/d_test.py"]),
  ("parallel/peer.py", ["tests/caatnet/e_test.py"]),
  ("caatnet/f.py", ["tests/caatnet/e_test.py"]),
])
def test_reaching(tmp_path, file, tests):
  for name, text in FILES.items():
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text(text)
  assert reaching(tmp_path, file) == tests
