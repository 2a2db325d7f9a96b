"""How long fuzz tests run: CPUMOE_FUZZ_SECONDS (default 20) for all of them together."""

import os
import time
from collections.abc import Iterator

TESTS = 8  # that share the time
SECONDS = float(os.environ.get("CPUMOE_FUZZ_SECONDS", "20")) / TESTS


def rounds() -> Iterator[int]:
    """Seeds until the time is up; the first hundred always."""
    end = time.monotonic() + SECONDS
    seed = 0
    while seed < 100 or time.monotonic() < end:
        yield seed
        seed += 1
