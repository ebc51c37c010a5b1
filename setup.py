"""Packages of the wheel. Metadata and dependencies are in setup.cfg.

setup.cfg cannot give a folder another place. The wheel has launch/, configs/
and results/ in caatnet/_bundle, where they clash with no other distribution;
caatnet/commands.py finds them there.
"""

import shutil

import setuptools

# setuptools would copy modules that no longer exist from an earlier build.
shutil.rmtree("build", ignore_errors=True)

FOLDERS = ("configs", "launch", "results")


def packages_of(*names):
  found = setuptools.find_namespace_packages(
    include=[pattern for name in names for pattern in (name, f"{name}.*")]
  )
  return [name for name in found if "__pycache__" not in name]


setuptools.setup(
  packages=[
    *packages_of("caatnet", "parallel"),
    *(f"caatnet._bundle.{name}" for name in packages_of(*FOLDERS)),
  ],
  package_dir={f"caatnet._bundle.{name}": name for name in FOLDERS},
)
