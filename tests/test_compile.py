"""torch.compile: the same casts as in eager mode, whatever was compiled before."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from networks import assert_identical
from torch import nn

import amp_patch as amp

BACKENDS = ["eager", "aot_eager"]
HALF = torch.bfloat16

# Some versions of torch.compile warn about themselves when they first run.
pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture(scope="module", autouse=True)
def _compiler_has_started() -> None:
    """What torch.compile leaves behind for good when it first runs, and a thread, is its own."""
    torch.compile(nn.Linear(1, 1), backend="aot_eager")(torch.ones(1, 1))
    if shutil.which("g++") is not None:
        torch.compile(nn.Linear(1, 1))(torch.ones(1, 1))
    torch.compiler.reset()


@pytest.fixture(autouse=True)
def _compiles_from_scratch() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class Net(nn.Module):
    """Operations of each rule, in several spellings."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h = self.linear(x)
        return (
            h,
            F.linear(x, h),
            torch.matmul(x, h),
            x @ h,
            x.matmul(h),
            h.exp(),
            torch.exp(h),
            F.softmax(h, -1),
            h + x,
        )


def dtypes(results: tuple[torch.Tensor, ...]) -> list[torch.dtype]:
    return [result.dtype for result in results]


@pytest.mark.parametrize("fullgraph", [False, True], ids=["", "fullgraph"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_model_casts_as_in_eager_mode(backend: str, fullgraph: bool) -> None:
    model = amp.initialize(Net(), opt_level="O4", verbosity=0)
    x = torch.randn(4, 4)
    expected = model(x)
    found = torch.compile(model, backend=backend, fullgraph=fullgraph)(x)
    assert dtypes(found) == dtypes(expected)
    assert dtypes(expected)[:5] == [HALF] * 5
    assert_identical([one.detach() for one in found], [one.detach() for one in expected])


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_default_backend_casts_as_in_eager_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    # With more, the compiler keeps a pool of threads for the rest of the process.
    monkeypatch.setattr("torch._inductor.config.compile_threads", 1)
    model = amp.initialize(Net(), opt_level="O4", verbosity=0)
    x = torch.randn(4, 4)
    found, expected = torch.compile(model)(x), model(x)
    assert dtypes(found) == dtypes(expected)
    # The compiler fuses, and rounds less often.
    torch.testing.assert_close(found, expected, rtol=2**-6, atol=2**-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_function_casts(backend: str) -> None:
    amp.initialize(nn.Linear(1, 1), opt_level="O4", verbosity=0)

    @torch.compile(backend=backend)
    def compute(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return F.linear(x, w), torch.mm(x, w), x @ w, F.scaled_dot_product_attention(x, w, w)

    assert dtypes(compute(torch.ones(4, 4), torch.ones(4, 4))) == [HALF] * 4


@pytest.mark.parametrize("backend", BACKENDS)
def test_code_compiled_before_initialize_is_not_reused_nor_after_uninitialize(
    backend: str,
) -> None:
    model, x = Net(), torch.randn(4, 4)
    compiled = torch.compile(model, backend=backend)
    before = dtypes(compiled(x))
    amp.initialize(model, opt_level="O4", verbosity=0)
    during = dtypes(compiled(x))
    another = dtypes(torch.compile(Net(), backend=backend)(x))
    amp.uninitialize()
    after = dtypes(compiled(x))
    assert before == after == [torch.float32] * 9
    assert during == another == dtypes_of_the_level(x)


def dtypes_of_the_level(x: torch.Tensor) -> list[torch.dtype]:
    model = amp.initialize(Net(), opt_level="O4", verbosity=0)
    expected = dtypes(model(x))
    amp.uninitialize()
    return expected


@pytest.mark.parametrize("backend", BACKENDS)
def test_code_compiled_with_casts_is_not_reused_without_them_nor_the_other_way(
    backend: str,
) -> None:
    model, x = amp.initialize(Net(), opt_level="O4", verbosity=0), torch.randn(4, 4)
    expected = dtypes(model(x))
    compiled = torch.compile(model, backend=backend)
    for _ in range(2):
        assert dtypes(compiled(x)) == expected
        with amp.disable_casts():
            assert dtypes(compiled(x)) == [torch.float32] * 9


@pytest.mark.parametrize("backend", BACKENDS)
def test_code_compiled_without_casts_first_casts_afterwards(backend: str) -> None:
    model, x = amp.initialize(Net(), opt_level="O4", verbosity=0), torch.randn(4, 4)
    compiled = torch.compile(model, backend=backend)
    with amp.disable_casts():
        assert dtypes(compiled(x)) == [torch.float32] * 9
    assert dtypes(compiled(x)) == dtypes(model(x))


def test_a_registration_reaches_code_that_was_compiled_before() -> None:
    model = amp.initialize(nn.Linear(1, 1), opt_level="O4", verbosity=0)
    compute = torch.compile(torch_tanh, backend="aot_eager")
    assert compute(torch.ones(2)).dtype is torch.float32
    amp.register_half_function(torch, "tanh")
    try:
        assert compute(torch.ones(2)).dtype is model(torch.ones(1)).dtype is HALF
    finally:
        amp.unregister_function(torch, "tanh")
    assert compute(torch.ones(2)).dtype is torch.float32


def torch_tanh(x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x)


def train(opt_level: str, compiles: Callable[[nn.Module], Any]) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level=opt_level, verbosity=0, loss_scale=128.0)
    forward = compiles(model)
    x = torch.randn(3, 4)
    for _ in range(3):
        optimizer.zero_grad()
        loss = forward(x).float().square().mean()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
    trained = [parameter.detach().clone() for parameter in model.parameters()]
    amp.uninitialize()
    return trained


@pytest.mark.parametrize("opt_level", ["O1", "O2", "O4", "O5"])
def test_a_compiled_model_trains_as_the_model_does(opt_level: str) -> None:
    compiled = train(opt_level, lambda model: torch.compile(model, backend="aot_eager"))
    # The joint graph of forward and backward may round in another order.
    torch.testing.assert_close(compiled, train(opt_level, lambda model: model), rtol=0, atol=1e-3)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_compiled_part_of_a_model_casts(backend: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), Net())
    amp.initialize(model, opt_level="O4", verbosity=0)
    x = torch.randn(4, 4)
    expected = dtypes(model(x))
    model[1] = torch.compile(model[1], backend=backend)
    assert dtypes(model(x)) == expected


def test_a_module_compiled_in_place_before_initialize_casts() -> None:
    model, x = Net(), torch.randn(4, 4)
    model.compile(backend="aot_eager")
    amp.initialize(model, opt_level="O4", verbosity=0)
    assert dtypes(model(x))[0] is HALF


def test_initialize_refuses_the_compiled_model_and_names_the_order() -> None:
    with pytest.raises(amp.AmpError, match=r"call torch\.compile on what initialize returns"):
        amp.initialize(torch.compile(Net(), backend="eager"), opt_level="O4", verbosity=0)


@pytest.mark.parametrize(("opt_level", "half"), [("O1", torch.float16), ("O4", torch.bfloat16)])
@pytest.mark.filterwarnings("ignore:.*flex_attention called without torch.compile")
def test_flex_attention_takes_mixed_dtypes(opt_level: str, half: torch.dtype) -> None:
    model = amp.initialize(nn.Linear(1, 1), opt_level=opt_level, verbosity=0)
    attention = pytest.importorskip("torch.nn.attention.flex_attention").flex_attention
    query, key, value = (torch.randn(1, 2, 16, 8) for _ in range(3))
    expected = F.scaled_dot_product_attention(query.double(), key.double(), value.double())
    for operands in (
        (query, key, value),
        (query.to(half), key, value),
        (query.to(half), key.to(half), value),
    ):
        result = attention(*operands)
        assert result.dtype is half
        # Scores of 8 products and weights of 16, each rounded to 8 bits or more.
        torch.testing.assert_close(result.double(), expected, rtol=2**-5, atol=2**-5)
    del model
