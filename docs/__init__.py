"""Tools of the repository, each of which is ``python -m docs.NAME``."""

import launch  # noqa: F401  # its handlers of signals come before all imports
