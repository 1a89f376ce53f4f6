"""Nothing depends on what a device is called: every level runs where its kernels are."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from networks import LEVELS
from torch import nn

import amp_patch as amp

PACKAGE = Path(amp.__file__).parent
DEVICE_TYPES = ("cuda", "cpu", "mps", "xpu", "hpu", "npu", "mtia")
HALVES = {"O1": torch.float16, "O4": torch.bfloat16}

# Where a word for a device is no decision about one, each with the reason.
NO_DECISION = {
    # The ranks agree over a backend for host memory, which torch.distributed calls by this name.
    ("scaling/ranks.py", "cpu"),
    # The default of the option --device of the demo.
    ("__main__.py", "cpu"),
    # torch's own SyncBatchNorm has no kernels for host memory.
    ("compat/sync_batchnorm.py", "cpu"),
    # What the description of the machine says of its processor.
    ("tools/machine.py", "cpu"),
    # Where the digits of the demonstration are, and a model that has no weights.
    ("tools/compare_demo.py", "cpu"),
    ("tools/doctor_checks.py", "cpu"),
}


def device_words(source: str) -> Iterator[str]:
    """Device types that code names: as a whole string, or as a module of torch."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            word = node.value.partition(":")[0]
            if word in DEVICE_TYPES:
                yield word
        if isinstance(node, ast.Attribute) and node.attr in (*DEVICE_TYPES, "is_cuda"):
            is_torchs = isinstance(node.value, ast.Name) and node.value.id == "torch"
            if is_torchs or node.attr == "is_cuda":
                yield node.attr


def test_no_logic_names_a_device() -> None:
    found = {
        (path.relative_to(PACKAGE).as_posix(), word)
        for path in PACKAGE.rglob("*.py")
        for word in device_words(path.read_text(encoding="utf-8"))
    }
    assert found <= NO_DECISION


@pytest.mark.parametrize("code", ['x = "cuda:0"', "torch.cuda.synchronize()", "t.is_cuda"])
def test_naming_a_device_would_be_found(code: str) -> None:
    assert list(device_words(code))


@pytest.mark.filterwarnings("ignore:.*float16 on this device")
@pytest.mark.parametrize("opt_level", LEVELS)
def test_a_model_without_storage_is_initialized_and_traced_through(opt_level: str) -> None:
    """The device `meta` stands for one whose kernels nobody has heard of: no value is ever read."""
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    model = model.to("meta")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level=opt_level, verbosity=0)
    output = model(torch.empty(3, 4, device="meta"))
    assert output.device.type == "meta"
    if opt_level in ("O2", "O5", "O0"):
        assert output.dtype is torch.float32
    if opt_level in HALVES:
        assert output.dtype is HALVES[opt_level]
    assert {parameter.device.type for parameter in amp.master_params(optimizer)} == {"meta"}


@pytest.mark.parametrize("opt_level", LEVELS)
def test_a_model_on_two_devices_is_initialized(opt_level: str) -> None:
    """As an embedding table that stays on the host, beside layers on an accelerator."""
    model = nn.ModuleDict({"table": nn.Embedding(5, 4), "layer": nn.Linear(4, 2, device="meta")})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level=opt_level, verbosity=0)
    devices = [parameter.device.type for parameter in amp.master_params(optimizer)]
    assert devices == ["cpu", "meta", "meta"]


def signal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape)


MISSING_KERNELS: dict[str, Callable[[torch.dtype], torch.Tensor]] = {
    "ctc_loss": lambda half: F.ctc_loss(
        signal(5, 1, 4).log_softmax(-1).to(half),
        torch.tensor([[1, 2]]),
        torch.tensor([5]),
        torch.tensor([2]),
    ),
    "fft": lambda half: torch.fft.rfft(signal(8).to(half)).abs(),
    "svd": lambda half: torch.linalg.svdvals(signal(4, 3).to(half)),
    "inverse": lambda half: torch.inverse((signal(3, 3) + 4 * torch.eye(3)).to(half)),
    "cdist": lambda half: torch.cdist(signal(3, 2).to(half), signal(4, 2).to(half)),
    "det": lambda half: torch.linalg.det(signal(3, 3).to(half)),
    "lstsq": lambda half: torch.linalg.lstsq(signal(4, 2).to(half), signal(4, 1).to(half))[0],
}


@pytest.mark.parametrize("opt_level", HALVES)
@pytest.mark.parametrize("name", MISSING_KERNELS)
def test_what_has_no_half_kernel_runs_all_the_same(name: str, opt_level: str) -> None:
    run, half = MISSING_KERNELS[name], HALVES[opt_level]
    torch.manual_seed(1)
    with pytest.raises(RuntimeError):  # if it passes, torch has the kernel now: take another
        run(half)
    amp.initialize(nn.Linear(1, 1), opt_level=opt_level, verbosity=0)
    torch.manual_seed(1)
    result = run(half)
    with amp.disable_casts():
        torch.manual_seed(1)
        expected = run(torch.float32)
    assert result.dtype in (torch.float32, half)
    # The operands were rounded to half, and the worst of these functions is an inverse.
    torch.testing.assert_close(result.float(), expected, rtol=0.05, atol=0.05)
