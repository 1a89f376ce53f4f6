"""References to torch functions taken before `initialize`: rebound, or at least listed."""

from __future__ import annotations

import functools
import sys
import types
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import amp_patch as amp

HALF = torch.bfloat16
SCRIPT = """
import torch
from torch import matmul, mm as product
from torch.nn.functional import linear, softmax as weights, conv2d, scaled_dot_product_attention
from torch import nn, Tensor

unbound = Tensor.matmul

class Attention(nn.Module):
    def forward(self, x):
        scores = matmul(x, x)
        return linear(weights(scores, -1), product(x, x)), unbound(x, x)
"""


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A module of a user, loaded before `initialize`."""
    module = types.ModuleType("users_script")
    monkeypatch.setitem(sys.modules, "users_script", module)
    exec(SCRIPT, vars(module))  # noqa: S102
    return module


@pytest.fixture
def model() -> nn.Module:
    return nn.Linear(4, 4)


def start(model: nn.Module) -> None:
    amp.initialize(model, opt_level="O4", verbosity=0)


def listed() -> set[tuple[str, str]]:
    """Functions and their places. Slow: walks all objects."""
    return {(one.function, one.place) for one in amp.stored_references()}


def test_names_in_loaded_modules_are_rebound_and_given_back(
    script: types.ModuleType, model: nn.Module
) -> None:
    before = dict(vars(script))
    x = torch.ones(4, 4)
    start(model)
    assert [one.dtype for one in script.Attention()(x)] == [HALF, HALF]
    assert script.weights(x.to(HALF), -1).dtype is torch.float32
    amp.uninitialize()
    after = vars(script)
    assert before.keys() == after.keys()
    assert all(after[name] is value for name, value in before.items())
    assert [one.dtype for one in script.Attention()(x)] == [torch.float32] * 2


def test_names_taken_during_the_session_are_plain_after_it(
    monkeypatch: pytest.MonkeyPatch, model: nn.Module
) -> None:
    plain = {"linear": F.linear, "matmul": torch.matmul}
    start(model)
    module = types.ModuleType("imported_meanwhile")
    monkeypatch.setitem(sys.modules, "imported_meanwhile", module)
    exec("from torch.nn.functional import linear\nfrom torch import matmul", vars(module))  # noqa: S102
    assert module.matmul(torch.ones(2, 2), torch.ones(2, 2)).dtype is HALF
    amp.uninitialize()
    assert module.linear is plain["linear"]
    assert module.matmul is plain["matmul"]


def test_names_that_the_user_binds_anew_are_left_to_them(
    script: types.ModuleType, model: nn.Module
) -> None:
    start(model)
    script.matmul = "something else"
    del script.product
    amp.uninitialize()
    assert script.matmul == "something else"
    assert not hasattr(script, "product")


def test_several_sessions_one_after_another_leave_no_trace(
    script: types.ModuleType, model: nn.Module
) -> None:
    plain = [script.linear]
    for level in ("O1", "O4", "O0", "O5", "O4"):
        amp.initialize(model, opt_level=level, verbosity=0)
        assert (script.linear is plain[0]) is (level in ("O0", "O5"))
        amp.uninitialize()
    assert script.linear is plain[0]


def test_modules_that_are_odd_are_passed_over(
    monkeypatch: pytest.MonkeyPatch, model: nn.Module
) -> None:
    class Odd(types.ModuleType):
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError("do not touch")

    monkeypatch.setitem(sys.modules, "odd", Odd("odd"))
    monkeypatch.setitem(sys.modules, "nothing", None)
    monkeypatch.setitem(sys.modules, "no_module", object())
    start(model)
    assert isinstance(amp.stored_references(), list)


class Holder:
    shared = staticmethod(torch.mm)

    def __init__(self) -> None:
        self.activation = F.kl_div
        self.table = {"mm": torch.mm}
        self.listed = [torch.bmm]
        self.partial = functools.partial(torch.softmax, dim=-1)


def test_attributes_in_a_model_are_rebound_and_given_back() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Module()
            self.inner.product = torch.mm

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner.product(x, x)

    net, plain = Net(), [torch.mm]
    start(net)
    assert net(torch.ones(2, 2)).dtype is HALF
    assert ("torch.mm", "Module object, attribute product") not in listed()
    amp.uninitialize()
    assert net.inner.product is plain[0]


def default_of(x: torch.Tensor, operation: Any = torch.logsumexp) -> torch.Tensor:
    return operation(x, -1)


def closure_of() -> Any:
    held = torch.cumprod

    def inner(x: torch.Tensor) -> torch.Tensor:
        return held(x, -1)

    return inner


TABLE = {"attention": F.scaled_dot_product_attention}


def test_functions_in_objects_are_listed_with_their_place(model: nn.Module) -> None:
    holder, inner = Holder(), closure_of()
    start(model)
    assert listed() >= {
        ("torch.nn.functional.kl_div", "Holder object, attribute activation"),
        ("torch.mm", "Holder object, attribute table"),
        ("torch.mm", "class Holder, attribute shared"),
        ("torch.bmm", "Holder object, attribute listed"),
        ("torch.softmax", "Holder object, attribute partial"),
        ("torch.logsumexp", "function default_of, a default"),
        ("torch.cumprod", "function closure_of.<locals>.inner, its closure"),
        ("torch.nn.functional.scaled_dot_product_attention", f"module {__name__}, name TABLE"),
    }
    del holder, inner


def test_a_listed_reference_reads_as_a_sentence(model: nn.Module) -> None:
    holder = Holder()
    start(model)
    sentences = [str(one) for one in amp.stored_references()]
    assert "torch.nn.functional.kl_div in Holder object, attribute activation" in sentences
    del holder


def test_functions_taken_anew_are_not_listed(model: nn.Module) -> None:
    start(model)
    before = len(amp.stored_references())
    holder = Holder()
    assert len(amp.stored_references()) == before
    del holder


def test_nothing_is_listed_where_no_casts_are_active(model: nn.Module) -> None:
    assert amp.stored_references() == []
    amp.initialize(model, opt_level="O5", verbosity=0)
    assert amp.stored_references() == []


def test_generated_code_meets_the_casts_at_the_home_of_a_function(model: nn.Module) -> None:
    plain = [torch._C._nn.linear]
    start(model)
    assert torch._C._nn.linear(torch.ones(2, 2), torch.ones(2, 2)).dtype is HALF
    amp.uninitialize()
    assert torch._C._nn.linear is plain[0]
