"""Every test starts from the same seed and fails if it leaves a trace in the process."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator

import hypothesis
import pytest
import torch
from process_state import ProcessState

import amp_patch as amp

pytest_plugins = ["pytester"]

# No deadline: a first call of torch may take long, and no test asserts a time. The same examples
# each time: a failure that comes and goes helps nobody (--hypothesis-seed=N tries others).
hypothesis.settings.register_profile("amp_patch", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("amp_patch")


def pytest_configure() -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:
        torch.set_num_threads(1)  # the workers share the cores; each would take all of them


@pytest.fixture(autouse=True)
def _leaves_no_trace() -> Iterator[None]:
    """Ends the session of a test, then fails it if anything else is left behind."""
    random.seed(0)
    torch.manual_seed(0)
    before = ProcessState.capture()
    yield
    amp.uninitialize()
    left_behind = before.differences(ProcessState.capture())
    if left_behind:
        pytest.fail("\n  ".join(["the test left behind:", *left_behind]), pytrace=False)
