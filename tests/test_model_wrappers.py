"""Models in wrappers, and arguments of every kind on their way through a cast model."""

from __future__ import annotations

import collections
import copy
import dataclasses
import io
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from networks import LEVELS, assert_identical, backward, train_step
from torch import nn

import amp_patch as amp

EVERY = pytest.mark.parametrize("opt_level", LEVELS)
CAST = pytest.mark.parametrize("opt_level", ["O2", "O3", "O5"])


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(4, 6), torch.randn(4, 3)


def started(model: nn.Module, opt_level: str, **options: Any) -> tuple[nn.Module, Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return amp.initialize(model, optimizer, opt_level=opt_level, **options)


# -- wrappers --------------------------------------------------------------------------------------


def replica_of(model: nn.Linear, weight: torch.Tensor) -> nn.Module:
    """As nn.DataParallel makes them: a shallow copy whose parameters are plain tensors."""
    replica = model._replicate_for_data_parallel()
    replica.weight, replica.bias = weight, None
    return replica  # type: ignore[no-any-return]


@EVERY
def test_a_replica_computes_with_its_own_weights(opt_level: str) -> None:
    model = nn.Linear(2, 1, bias=False)
    started(model, opt_level, cast_model_outputs=torch.float32)
    replica = replica_of(model, torch.full_like(model.weight, 5.0))
    assert replica(torch.ones(1, 2)).item() == 10.0
    assert model(torch.ones(1, 2)).item() != 10.0


@EVERY
def test_a_shallow_copy_with_other_parameters_uses_these(opt_level: str) -> None:
    model = nn.Linear(2, 1, bias=False)
    started(model, opt_level)
    twin = copy.copy(model)
    weight = nn.Parameter(torch.full_like(model.weight, 5.0))
    twin._parameters = {"weight": weight, "bias": None}  # noqa: SLF001 (as DataParallel does)
    assert twin(torch.ones(1, 2)).item() == 10.0


@EVERY
def test_gradients_of_replicas_reach_the_model(opt_level: str) -> None:
    model = nn.Linear(2, 1, bias=False)
    scale = {"loss_scale": 128.0} if opt_level in ("O1", "O2") else {}
    _, optimizer = started(model, opt_level, **scale)
    replicas = [replica_of(model, model.weight * 1.0) for _ in range(2)]  # with their history
    loss = sum(replica(torch.ones(1, 2)).float().sum() for replica in replicas)
    backward(loss, optimizer)
    (master,) = amp.master_params(optimizer)
    assert master.grad.tolist() == [[2.0, 2.0]]


@EVERY
def test_data_parallel_around_an_initialized_model_trains(opt_level: str) -> None:
    model, optimizer = started(net(), opt_level)
    wrapped = nn.DataParallel(model)
    losses = [train_step(wrapped, optimizer, batch(), factor=2.0**-8) for _ in range(2)]
    assert all(loss > 0 for loss in losses)
    assert list(wrapped.state_dict()) == [f"module.{name}" for name in model.state_dict()]


@pytest.mark.parametrize("opt_level", ["O1", "O2", "O3", "O4", "O5"])
def test_a_wrapped_model_is_refused_with_the_right_order(opt_level: str) -> None:
    wrapped = nn.DataParallel(net())
    with pytest.raises(
        amp.AmpError, match="found it wrapped in DataParallel; wrap what initialize returns"
    ):
        started(wrapped, opt_level)


@pytest.mark.parametrize("opt_level", ["O1", "O2", "O3", "O4", "O5"])
def test_a_compiled_model_is_refused_with_the_right_order(opt_level: str) -> None:
    compiled = torch.compile(net(), backend="eager")
    with pytest.raises(amp.AmpError, match=r"call torch\.compile on what initialize returns"):
        started(compiled, opt_level)


@pytest.mark.parametrize("opt_level", ["O1", "O2", "O3", "O4", "O5"])
def test_a_model_with_a_wrapper_inside_is_refused_or_trained(opt_level: str) -> None:
    """A backbone in DataParallel below a plain head."""
    model = nn.Sequential(nn.DataParallel(nn.Linear(6, 5)), nn.Linear(5, 3))
    try:
        _, optimizer = started(model, opt_level)
    except amp.AmpError as error:
        assert "DataParallel" in str(error)  # noqa: PT017 (either is right)
    else:
        train_step(model, optimizer, batch(), factor=2.0**-8)
        assert not amp.step_was_skipped(optimizer)


@EVERY
def test_a_wrapper_of_the_user_needs_no_order(opt_level: str) -> None:
    class Wrapper(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return self.module(*args, **kwargs)

    inner = net()
    model, optimizer = started(Wrapper(inner), opt_level)
    train_step(model, optimizer, batch(), factor=2.0**-8)
    assert not amp.step_was_skipped(optimizer)


def test_an_optimizer_over_two_devices_is_checked_on_each() -> None:
    """The meta device stands for another one: its gradients are seen, and grouped apart."""
    model, other = nn.Linear(2, 1), nn.Linear(2, 1, device="meta")
    optimizer = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1)
    amp.initialize([model], optimizer, opt_level="O1", loss_scale=8.0)
    backward(model(torch.ones(1, 2)).float().sum(), optimizer)
    optimizer.step()
    assert not amp.step_was_skipped(optimizer)


# -- tracing ---------------------------------------------------------------------------------------


@EVERY
def test_a_traced_model_computes_what_the_model_does(opt_level: str) -> None:
    model, optimizer = started(net(), opt_level)
    train_step(model, optimizer, batch(), factor=2.0**-8)
    inputs = batch()[0]
    model.eval()
    with torch.no_grad():
        traced = torch.jit.trace(model, inputs)
        expected = model(inputs)
        assert_identical(traced(inputs), expected)
    file = io.BytesIO()
    torch.jit.save(traced, file)
    file.seek(0)
    with torch.no_grad():
        assert_identical(torch.jit.load(file)(inputs), expected)


@EVERY
def test_an_exported_model_has_its_parameters_as_parameters(opt_level: str) -> None:
    model, optimizer = started(net(), opt_level)
    train_step(model, optimizer, batch(), factor=2.0**-8)
    model.eval()
    inputs = batch()[0]
    program = torch.export.export(model, (inputs,))
    assert set(program.graph_signature.parameters) == {name for name, _ in model.named_parameters()}
    assert not program.constants
    with torch.no_grad():
        found, expected = program.module()(inputs), model(inputs)
    unit = 2.0**-8 if opt_level in ("O4", "O5") else 2.0**-11
    torch.testing.assert_close(found.float(), expected.float(), rtol=8 * unit, atol=8 * unit)


# -- what forward gives and takes ------------------------------------------------------------------


class Out(dict):
    """A dict with attributes, as model outputs of other libraries are."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.note = "kept"

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class Pair(NamedTuple):
    logits: torch.Tensor
    hidden: torch.Tensor


@dataclasses.dataclass
class Record:
    logits: torch.Tensor
    label: str = "kept"


@dataclasses.dataclass(frozen=True)
class Frozen:
    logits: torch.Tensor
    rest: tuple[Any, ...] = ()


class Giving(nn.Module):
    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.kind = kind

    def forward(self, x: torch.Tensor) -> Any:
        return self.kind(self.linear(x))


def default_dict(out: torch.Tensor) -> Any:
    found: Any = collections.defaultdict(list)
    found["logits"] = out
    return found


OUTPUTS: dict[str, Any] = {
    "dict": lambda out: {"logits": out},
    "dict subclass": lambda out: Out(logits=out),
    "OrderedDict": lambda out: collections.OrderedDict(b=1, logits=out, a=2),
    "defaultdict": default_dict,
    "namedtuple": lambda out: Pair(out, out),
    "dataclass": Record,
    "frozen dataclass": lambda out: Frozen(out, (1, "two")),
    "nested": lambda out: Out(logits=[Pair(out, out), {"x": (out,)}]),
}


def leaves(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if dataclasses.is_dataclass(value):
        value = [getattr(value, field.name) for field in dataclasses.fields(value)]
    items = value.values() if isinstance(value, dict) else value
    if not isinstance(value, (dict, list, tuple)):
        return []
    return [leaf for item in items for leaf in leaves(item)]


@pytest.mark.parametrize("kind", OUTPUTS.values(), ids=OUTPUTS)
@CAST
def test_outputs_keep_their_type_and_attributes_and_come_in_fp32(opt_level: str, kind: Any) -> None:
    model, _ = started(Giving(kind), opt_level)
    found, expected = model(torch.randn(1, 2)), kind(torch.zeros(1, 2))
    assert type(found) is type(expected)
    assert leaves(found)
    assert {leaf.dtype for leaf in leaves(found)} == {torch.float32}
    if isinstance(expected, dict):
        assert list(found) == list(expected)
    if isinstance(expected, Out):
        assert found.note == "kept"
        assert found.logits is found["logits"]
    if isinstance(expected, collections.defaultdict):
        assert found["missing"] == []
    if isinstance(expected, Record):
        assert found.label == "kept"


@CAST
def test_an_output_kept_by_the_model_is_not_changed_behind_its_back(opt_level: str) -> None:
    model, _ = started(Giving(lambda out: Out(logits=out)), opt_level)
    kept: list[Any] = []
    model.kind = lambda out: kept.append(Out(logits=out)) or kept[-1]
    found = model(torch.randn(1, 2))
    assert found is not kept[0]
    assert kept[0].logits.dtype is amp.OPT_LEVELS[opt_level].half_dtype


class Encoding:
    """Holds token ids; moves between devices with `to`."""

    def __init__(self, ids: torch.Tensor) -> None:
        self.ids = ids

    def to(self, target: Any) -> Encoding:
        return Encoding(self.ids.to(target))


class DevicesOnly:
    """Whose `to` knows no dtypes."""

    def to(self, target: Any) -> DevicesOnly:
        assert isinstance(target, torch.device), "a dtype came here"
        return self


class Looking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(60000, 2)

    def forward(self, batch: Any, *others: Any) -> Any:
        return self.embed(batch.ids if isinstance(batch, Encoding) else batch["ids"]), others


@pytest.mark.parametrize("held", ["object", "mapping"])
@CAST
def test_token_ids_reach_the_model_exactly(opt_level: str, held: str) -> None:
    model = Looking()
    exact = model.embed.weight.detach().clone()
    started(model, opt_level)
    ids = torch.arange(60000)
    given = Encoding(ids) if held == "object" else Out(ids=ids)
    found, _ = model(given)
    half = amp.OPT_LEVELS[opt_level].half_dtype
    assert_identical(found.detach(), exact.to(half).float())


@CAST
def test_objects_that_are_no_containers_pass_untouched(opt_level: str) -> None:
    model, _ = started(Looking(), opt_level)
    others = (DevicesOnly(), nn.Linear(2, 2), torch.Generator(), "text", None, {1, 2}, 3.5, b"x")
    _, found = model(Out(ids=torch.arange(3)), *others)
    assert all(one is other for one, other in zip(found, others, strict=True))
    assert others[1].weight.dtype is torch.float32


class Taking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.seen: Any = None

    def forward(self, batch: Any) -> torch.Tensor:
        self.seen = batch
        return self.linear(leaves(batch)[0])


@pytest.mark.parametrize("kind", OUTPUTS.values(), ids=OUTPUTS)
@CAST
def test_inputs_are_cast_in_copies_of_the_same_type(opt_level: str, kind: Any) -> None:
    model, _ = started(Taking(), opt_level)
    given = kind(torch.randn(1, 2))
    model(given)
    half = amp.OPT_LEVELS[opt_level].half_dtype
    assert type(model.seen) is type(given)
    assert {leaf.dtype for leaf in leaves(model.seen)} == {half}
    assert {leaf.dtype for leaf in leaves(given)} == {torch.float32}


@CAST
def test_packed_sequences_pass_or_are_cast_whole(opt_level: str) -> None:
    class Packing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, packed: Any) -> Any:
            data = packed.data.to(self.linear.weight.dtype)
            return packed._replace(data=self.linear(data))

    model, _ = started(Packing(), opt_level)
    packed = nn.utils.rnn.pack_sequence([torch.randn(3, 3), torch.randn(2, 3)])
    found = model(packed)
    assert type(found) is type(packed)
    assert_identical(found.batch_sizes, packed.batch_sizes)
    assert found.data.isfinite().all()


@EVERY
def test_sparse_and_complex_and_integer_arguments_pass(opt_level: str) -> None:
    class Keeping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)

        def forward(self, x: torch.Tensor, *others: torch.Tensor) -> Any:
            return F.relu(self.linear(x)), others

    model, _ = started(Keeping(), opt_level)
    others = (
        torch.ones(2, dtype=torch.complex64),
        torch.ones(2, dtype=torch.int64),
        torch.ones(2, dtype=torch.bool),
        torch.ones(2, dtype=torch.float64),
    )
    _, found = model(torch.randn(1, 2), *others)
    assert all(one is other for one, other in zip(found, others, strict=True))
