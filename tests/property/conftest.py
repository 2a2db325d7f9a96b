"""The float64 reference of tests/ops serves here too."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "ops"))
