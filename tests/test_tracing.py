"""TorchScript, jit.trace, torch.fx, torch.export, make_fx: casts are kept, weights stay weights."""

from __future__ import annotations

import io
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from networks import assert_identical
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import amp_patch as amp

HALF = torch.bfloat16

# torch.jit says that it is deprecated wherever it is used.
pytestmark = pytest.mark.filterwarnings("default::DeprecationWarning")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.out = nn.Linear(4, 4)

    def forward(self, x, other):  # noqa: ANN001, ANN201 (torch.fx pickles no annotations in quotes)
        h = F.gelu(self.linear(x))
        h = torch.matmul(h, other) @ other
        h = F.linear(h.matmul(other), self.out.weight)
        return self.out(torch.tanh(h) + x)


def half_net(opt_level: str = "O4") -> Net:
    return amp.initialize(Net(), opt_level=opt_level, verbosity=0)


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randn(4, 4), torch.randn(4, 4)


def warm(model: nn.Module) -> None:
    """Fill the cache with casts of both kinds."""
    with torch.no_grad():
        model(*inputs())
    model(*inputs())


def reloaded(scripted: Any) -> Any:
    buffer = io.BytesIO()
    torch.jit.save(scripted, buffer)
    buffer.seek(0)
    return torch.jit.load(buffer)


@pytest.fixture(scope="module", autouse=True)
def _compiler_has_started() -> None:
    """What torch.export leaves behind for good when it first runs is its own."""
    torch.export.export(nn.Linear(1, 1), (torch.ones(1, 1),), strict=True)


# -- jit.trace ------------------------------------------------------------------------------------


@pytest.mark.parametrize("records", [True, False], ids=["grad", "no_grad"])
@pytest.mark.parametrize("opt_level", ["O1", "O4", "O2", "O5"])
def test_traced_model_has_its_casts_and_its_weights_in_it(opt_level: str, records: bool) -> None:
    model = half_net(opt_level).eval()
    warm(model)
    with torch.set_grad_enabled(records):
        expected = model(*inputs())
        traced = torch.jit.trace(model, inputs(), check_trace=True)
        loaded = reloaded(traced)
        for one in (traced, loaded):
            assert_identical(one(*inputs()).detach(), expected.detach())
            assert {name for name, _ in one.named_parameters()} == {
                name for name, _ in model.named_parameters()
            }
    amp.uninitialize()
    assert_identical(loaded(*inputs()).detach(), expected.detach())  # where there is no amp as well


@pytest.mark.parametrize("opt_level", ["O1", "O4"])
def test_graph_for_onnx_has_weights_as_inputs_and_no_half_constant(opt_level: str) -> None:
    """The exporter to ONNX starts from this graph, in which a cached cast would be a constant."""
    model = half_net(opt_level).eval()
    warm(model)
    graph, *_ = torch.jit._get_trace_graph(model, inputs())  # noqa: SLF001 (the exporter's entry)
    assert len(list(graph.inputs())) == len(inputs()) + len(list(model.parameters()))
    constants = [
        node.t("value")
        for node in graph.nodes()
        if node.kind() == "prim::Constant"
        and node.hasAttribute("value")
        and node.kindOf("value") == "t"
    ]
    assert not [one for one in constants if one.dtype in (torch.float16, torch.bfloat16)]
    assert "aten::to" in {node.kind() for node in graph.nodes()}


@pytest.mark.parametrize("opt_level", ["O2", "O5"])
def test_graph_for_onnx_of_a_half_model_is_made_in_full_precision(opt_level: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level=opt_level, verbosity=0)
    with amp.full_precision(model):
        graph, *_ = torch.jit._get_trace_graph(model, (torch.randn(2, 4),))  # noqa: SLF001
    assert len(list(graph.inputs())) == 1 + len(list(model.parameters()))
    assert not {"Half", "BFloat16"} & set(str(graph).replace("(", " ").split())


def test_traced_model_follows_its_weights() -> None:
    model = half_net()
    warm(model)
    traced = torch.jit.trace(model, inputs())
    with torch.no_grad():
        model.out.weight.zero_()
        model.out.bias.zero_()
    assert torch.count_nonzero(traced(*inputs())) == 0


def test_gradients_flow_through_a_traced_model() -> None:
    model = half_net()
    traced = torch.jit.trace(model, inputs())
    traced(*inputs()).float().sum().backward()
    found = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    model(*inputs()).float().sum().backward()
    expected = [parameter.grad for parameter in model.parameters()]
    # One cast a use in the trace, one in all in the model: gradients of two uses add up elsewhere.
    torch.testing.assert_close(found, expected, rtol=2**-6, atol=2**-6)


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.mm(a, b)


def test_function_is_traced_with_casts() -> None:
    half_net_kept = half_net()
    traced = torch.jit.trace(product, inputs())
    assert traced(*inputs()).dtype is HALF
    del half_net_kept


# -- jit.script -----------------------------------------------------------------------------------


def test_model_scripted_after_initialize_casts() -> None:
    model = half_net()
    scripted = torch.jit.script(model)
    found = scripted(*inputs())
    assert found.dtype is HALF
    assert_identical(found.detach(), model(*inputs()).detach())
    assert len(model._forward_hooks) == len(model._forward_pre_hooks) == 1  # back again
    found.float().sum().backward()
    assert model.linear.weight.grad.dtype is torch.float32


def test_model_scripted_before_initialize_casts_and_no_longer_after_uninitialize() -> None:
    model = Net()
    scripted = torch.jit.script(model)
    plain = scripted(*inputs())
    amp.initialize(model, opt_level="O4", verbosity=0)
    assert plain.dtype is torch.float32
    assert scripted(*inputs()).dtype is HALF
    with amp.disable_casts():
        assert_identical(scripted(*inputs()).detach(), plain.detach())
    amp.uninitialize()
    assert_identical(scripted(*inputs()).detach(), plain.detach())


def test_scripted_model_can_be_initialized_itself() -> None:
    scripted = torch.jit.script(Net())
    optimizer = torch.optim.SGD(scripted.parameters(), lr=0.1)
    amp.initialize(scripted, optimizer, opt_level="O4", verbosity=0)
    before = [parameter.detach().clone() for parameter in scripted.parameters()]
    loss = scripted(*inputs()).float().square().sum()
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    assert scripted(*inputs()).dtype is HALF
    assert not torch.equal(before[0], next(scripted.parameters()))


class Encoder(nn.Module):
    """Scripted with a method besides `forward`."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)

    @torch.jit.export
    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


def test_scripted_methods_other_than_forward_cast_and_no_longer_after_uninitialize() -> None:
    scripted, x = torch.jit.script(Encoder()), torch.randn(2, 4)
    plain, call = scripted.encode(x), vars(torch._C.ScriptMethod)["__call__"]
    amp.initialize(scripted, opt_level="O4", verbosity=0)
    with torch.autocast("cpu", HALF):
        expected = Encoder.forward(scripted, x)
    assert_identical(scripted.encode(x), expected)
    assert scripted.encode(x).dtype is HALF
    with amp.disable_casts():
        assert scripted.encode(x).dtype is torch.float32
    amp.uninitialize()
    assert_identical(scripted.encode(x), plain)
    assert vars(torch._C.ScriptMethod)["__call__"] is call


def test_scripted_part_takes_half_activations() -> None:
    model = nn.Sequential(nn.Linear(4, 4), torch.jit.script(nn.Linear(4, 4)), nn.Linear(4, 4))
    amp.initialize(model, opt_level="O4", verbosity=0)
    assert model(inputs()[0]).dtype is HALF


def test_scripted_function_takes_mixed_dtypes() -> None:
    model = half_net()

    scripted = torch.jit.script(product)
    assert scripted(model.linear(inputs()[0]), inputs()[1]).dtype is HALF
    with amp.disable_casts():
        assert scripted(*inputs()).dtype is torch.float32


def test_scripting_a_half_model_warns_that_its_entry_does_not_cast() -> None:
    model = half_net("O5")
    with pytest.warns(amp.AmpWarning, match="half weights, and no casts at its entry"):
        scripted = torch.jit.script(model)
    assert scripted(*(one.to(HALF) for one in inputs())).dtype is HALF
    assert model(*inputs()).dtype is torch.float32  # the hooks are back


def test_scripting_that_fails_gives_the_hooks_back() -> None:
    class Unscriptable(Net):
        def forward(self, x: torch.Tensor) -> Any:
            return eval("x")  # noqa: S307

    model = amp.initialize(Unscriptable(), opt_level="O4", verbosity=0)
    with pytest.raises(Exception, match="eval"):
        torch.jit.script(model)
    assert len(model._forward_hooks) == len(model._forward_pre_hooks) == 1


SCRIPTING = """
import sys, warnings
warnings.simplefilter("ignore")
import torch
import torch.nn.functional as F
import amp_patch as amp

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
    def forward(self, x):
        return torch.matmul(F.softmax(F.linear(x, self.linear.weight), -1), x)

def function(x: torch.Tensor):
    return F.linear(x, x)

model = Net()
if {first!r} == "script":
    scripted, scripted_function = torch.jit.script(model), torch.jit.script(function)
amp.initialize(model, opt_level="O4", verbosity=0)
if {first!r} == "initialize":
    scripted, scripted_function = torch.jit.script(model), torch.jit.script(function)
x = torch.ones(4, 4)
print(scripted(x).dtype, scripted_function(x).dtype)
amp.uninitialize()
print(scripted(x).dtype, scripted_function(x).dtype)
print(torch.jit.script(function)(x).dtype)
"""


@pytest.mark.parametrize("first", ["script", "initialize"])
def test_scripting_is_the_same_in_a_fresh_process_in_either_order(
    first: str, tmp_path: Path
) -> None:
    program = tmp_path / "program.py"  # the compiler reads the source from a file
    program.write_text(SCRIPTING.format(first=first))
    result = subprocess.run(
        [sys.executable, program],
        env={"PYTHONPATH": str(Path(amp.__file__).parents[1])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["torch.bfloat16"] * 2 + ["torch.float32"] * 3


# -- torch.fx -------------------------------------------------------------------------------------


@pytest.mark.parametrize("opt_level", ["O1", "O4"])
def test_fx_traces_recompiles_runs_and_pickles(opt_level: str) -> None:
    model = half_net(opt_level)
    warm(model)
    graph = torch.fx.symbolic_trace(model)
    graph.recompile()
    for one in (graph, pickle.loads(pickle.dumps(graph))):  # noqa: S301
        assert_identical(one(*inputs()).detach(), model(*inputs()).detach())


def test_fx_prints_code_that_names_the_functions_of_torch() -> None:
    code = torch.fx.symbolic_trace(half_net()).code
    assert "torch.matmul(" in code
    assert "matmul @ other" in code
    assert "CastWrapper" not in code


def test_fx_graph_made_during_the_session_is_plain_after_it() -> None:
    model = half_net()
    graph = torch.fx.symbolic_trace(model)
    amp.uninitialize()
    assert_identical(graph(*inputs()).detach(), model(*inputs()).detach())
    assert graph(*inputs()).dtype is torch.float32


def test_fx_graph_made_before_the_session_casts_in_it() -> None:
    model = Net()
    graph = torch.fx.symbolic_trace(model)
    amp.initialize(model, opt_level="O4", verbosity=0)
    assert_identical(graph(*inputs()).detach(), model(*inputs()).detach())


class Products(nn.Module):
    """Functions of all kinds: of C, of Python, of `torch.nn.functional`, and methods."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(F.linear(torch.mm(x, x), F.normalize(x.matmul(x))) @ x, -1)


@pytest.mark.parametrize("first", ["trace", "initialize"])
@pytest.mark.parametrize("opt_level", ["O1", "O4"])
def test_fx_interpreter_casts_as_the_generated_code_does(opt_level: str, first: str) -> None:
    model, x = Products(), torch.randn(4, 4)
    plain = model(x)
    if first == "trace":
        graph = torch.fx.symbolic_trace(model)
        amp.initialize(model, opt_level=opt_level, verbosity=0)
    else:
        amp.initialize(model, opt_level=opt_level, verbosity=0)
        graph = torch.fx.symbolic_trace(model)
    seen = []

    class Watch(torch.fx.Interpreter):
        def run_node(self, node: torch.fx.Node) -> Any:
            result = super().run_node(node)
            seen.append((node.name, result.dtype))
            return result

    assert_identical(Watch(graph).run(x), model(x))
    halves = {name for name, dtype in seen if dtype is {"O1": torch.float16, "O4": HALF}[opt_level]}
    assert halves == {"mm", "matmul", "linear", "matmul_1"}
    amp.uninitialize()
    assert_identical(torch.fx.Interpreter(graph).run(x), plain)


def test_make_fx_keeps_weights_as_inputs_and_leaves_no_cast_behind() -> None:
    model = half_net()
    warm(model)
    graph = make_fx(model.linear)(inputs()[0])
    assert "_to_copy" in graph.code
    assert_identical(graph(inputs()[0]).detach(), model.linear(inputs()[0]).detach())
    with torch.no_grad():
        model.linear.weight.zero_()
    assert_identical(model.linear(inputs()[0])[0].detach(), model.linear.bias.detach().to(HALF))


# -- torch.export ---------------------------------------------------------------------------------


@pytest.mark.parametrize("strict", [False, True], ids=["", "strict"])
@pytest.mark.parametrize("opt_level", ["O4", "O5"])
def test_exported_model_has_casts_and_parameters_in_it(opt_level: str, strict: bool) -> None:
    model = half_net(opt_level)
    warm(model)
    expected = model(*inputs()).detach()
    program = torch.export.export(model, inputs(), strict=strict)
    assert set(program.state_dict) >= {"linear.weight", "linear.bias", "out.weight", "out.bias"}
    assert_identical(program.module()(*inputs()).detach(), expected)
    assert_identical(model(*inputs()).detach(), expected)  # nothing of the export is in the cache
    if opt_level == "O4":  # at O5 the program has the weights of the model, which turn FP32 again
        amp.uninitialize()
        assert_identical(program.module()(*inputs()).detach(), expected)
