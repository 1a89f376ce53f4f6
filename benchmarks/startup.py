"""What it costs to start: import, initialize and uninitialize, each in fresh processes."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.rows import Report, Row, at_most
from benchmarks.turns import Settings

TITLE = "Start-up"
PROCESSES = 5
ROOT = Path(__file__).resolve().parent.parent

# The oracle: the output is half inside and FP32's, bit for bit, afterwards. Bytecode is read from a
# folder that an earlier process has filled, as it is there for all that pip has installed.
SCRIPT = """
import json, statistics, sys, time
import torch
sys.dont_write_bytecode, sys.pycache_prefix = False, sys.argv[2]
def timed(function):
    started = time.perf_counter()
    function()
    return 1e3 * (time.perf_counter() - started)
def load():
    global amp
    import amp_patch as amp
seconds = {"import": timed(load)}
from benchmarks.models import PROBLEMS, texts
torch.manual_seed(0)
model = PROBLEMS["gpt"].make_model()
tokens = texts(1, 4).inputs
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
expected = model(tokens)
def begin():
    amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
seconds["first initialize"] = timed(begin)
assert model(tokens).dtype is torch.float16
seconds["first uninitialize"] = timed(amp.uninitialize)
assert torch.equal(model(tokens), expected)
pairs = [(timed(begin), timed(amp.uninitialize)) for _ in range(int(sys.argv[1]))]
seconds["initialize"], seconds["uninitialize"] = map(statistics.median, zip(*pairs))
assert torch.equal(model(tokens), expected)
print(json.dumps(seconds))
"""
LIMITS = {
    "import": ("import amp_patch, beyond import torch", 50),
    "first initialize": ("initialize at O1, the first time", 50),
    "initialize": ("initialize at O1, warm", 50),
    "first uninitialize": ("uninitialize, the first time", 20),
    "uninitialize": ("uninitialize, warm", 20),
}


def measure(settings: Settings) -> Report:
    """Start processes one after the other, and one before that fills the caches of files."""
    processes = settings.size(PROCESSES, 1)
    repeats = settings.size(10, 1)
    with tempfile.TemporaryDirectory() as bytecode:
        runs = [run_process(repeats, bytecode) for _ in range(processes + 1)]
    counted = runs[-processes:]
    return Report(
        [
            Row(what, statistics.median(run[name] for run in counted), at_most(limit), "ms")
            for name, (what, limit) in LIMITS.items()
        ],
        [f"Medians over {processes} processes; GPT of 4 layers, SGD."],
    )


def run_process(repeats: int, bytecode: str) -> dict[str, float]:
    """Return the milliseconds that one process has measured; `bytecode` is a folder for it."""
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT, str(repeats), bytecode]
    done = subprocess.run(  # noqa: S603 (its own interpreter)
        command, check=True, capture_output=True, text=True, cwd=ROOT
    )
    return dict(json.loads(done.stdout))
