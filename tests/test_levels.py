"""What each opt level does to a model, its inputs and outputs, its operations and its state."""

from __future__ import annotations

import copy
import threading
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from networks import (
    HALF_LEVELS,
    LEVELS,
    MASTER_LEVELS,
    NETWORKS,
    OPTIMIZERS,
    OptimizerFactory,
    assert_identical,
    assert_same_objects,
    attributes_of,
    backward,
    cnn,
    dropping_mlp,
    mlp,
    normalised_mlp,
    plain_step,
    snapshot,
    state_of,
    train_step,
)
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import amp_patch as amp

BATCH_NORMS = {
    1: (nn.BatchNorm1d, (4, 3, 5)),
    2: (nn.BatchNorm2d, (4, 3, 5, 5)),
    3: (nn.BatchNorm3d, (4, 3, 2, 5, 5)),
}


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(4, 6), torch.randn(4, 3)


def initialized(
    opt_level: str, build: Callable[[], nn.Module] = normalised_mlp, **options: Any
) -> tuple[nn.Module, Any]:
    model = build()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    return amp.initialize(model, optimizer, opt_level=opt_level, **options)


# -- every level -----------------------------------------------------------------------------------


@pytest.mark.parametrize("opt_level", LEVELS)
@pytest.mark.parametrize("network", NETWORKS)
def test_a_network_learns_its_batch_at_every_level(opt_level: str, network: str) -> None:
    model, one = NETWORKS[network].build(), NETWORKS[network].batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level=opt_level)
    losses = [train_step(model, optimizer, one) for _ in range(8)]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("opt_level", LEVELS)
def test_initialize_returns_the_objects_it_was_given(opt_level: str) -> None:
    model = mlp()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    parameters = list(model.parameters())
    groups = [(group, group["params"]) for group in optimizer.param_groups]
    found = amp.initialize(model, optimizer, opt_level=opt_level)
    assert found[0] is model
    assert found[1] is optimizer
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    for found_group, (group, members) in zip(optimizer.param_groups, groups, strict=True):
        assert found_group is group
        assert found_group["params"] is members


@pytest.mark.parametrize("opt_level", LEVELS)
def test_the_loss_scale_of_each_level(opt_level: str) -> None:
    initialized(opt_level)
    assert amp.loss_scale() == (2.0**16 if opt_level in ("O1", "O2") else 1.0)


@pytest.mark.parametrize("opt_level", LEVELS)
def test_operations_run_untouched_when_enabled_is_false(opt_level: str) -> None:
    model = dropping_mlp()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    attributes = attributes_of(model)
    amp.initialize(model, optimizer, enabled=False, opt_level=opt_level)
    assert_same_objects(attributes_of(model), attributes)
    loss = model(batch()[0]).sum()
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        assert scaled_loss is loss
    assert amp.loss_scale() == 1.0
    assert amp.state_dict() == {}
    assert [id(p) for p in amp.master_params(optimizer)] == [id(p) for p in model.parameters()]
    train_step(model, optimizer, batch())
    assert not amp.step_was_skipped(optimizer)


# -- O0 --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("factory", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_o0_is_bit_identical_to_the_script_without_amp(factory: OptimizerFactory) -> None:
    results = []
    for is_plain in (True, False):
        torch.manual_seed(3)
        model = dropping_mlp()  # dropout draws random numbers
        optimizer = factory(model.parameters())
        if not is_plain:
            model, optimizer = amp.initialize(model, optimizer, opt_level="O0")
        step = plain_step if is_plain else train_step
        losses = [step(model, optimizer, batch()) for _ in range(6)]
        results.append(
            {
                "losses": losses,
                "trained": snapshot(model, optimizer),
                "buffers": {name: b.clone() for name, b in model.named_buffers()},
                "state_dict": dict(model.state_dict()),
                "random": torch.get_rng_state(),
            }
        )
    assert_identical(results[1], results[0])


def test_o0_hands_out_the_loss_itself() -> None:
    model, optimizer = initialized("O0")
    loss = model(batch()[0]).sum()
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        assert scaled_loss is loss


def test_o0_leaves_the_model_untouched() -> None:
    model = cnn()
    attributes = attributes_of(model)
    amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level="O0")
    assert_same_objects(attributes_of(model), attributes)


def test_o0_leaves_torch_untouched() -> None:
    before = {owner: dict(vars(owner)) for owner in (torch, F, torch.Tensor, torch.nn.Module)}
    initialized("O0")
    for owner, attributes in before.items():
        assert_same_objects(dict(vars(owner)), attributes)


# -- containers ------------------------------------------------------------------------------------


class Pair(NamedTuple):
    """A named tuple of tensors."""

    first: torch.Tensor
    second: torch.Tensor


@dataclass(frozen=True)
class Output:
    """A frozen dataclass with a tensor and something else."""

    tensor: torch.Tensor
    name: str


class Annotated(dict):  # type: ignore[type-arg]
    """A dict with an attribute of its own."""

    note: str = ""


class AnnotatedOrdered(OrderedDict):  # type: ignore[type-arg]
    """An ordered dict with an attribute of its own."""

    note: str = ""


def annotated(kind: type[Any], tensor: torch.Tensor) -> Any:
    made = kind(tensor=tensor, count=3)
    made.note = "kept"
    return made


CONTAINERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "tensor": lambda t: t,
    "tuple": lambda t: (t, 3),
    "list": lambda t: [t, None],
    "dict": lambda t: {"tensor": t, "count": 3},
    "namedtuple": lambda t: Pair(t, t + 1),
    "dataclass": lambda t: Output(t, "name"),
    "ordered-dict": lambda t: OrderedDict([("b", t), ("a", t + 1)]),
    "default-dict": lambda t: defaultdict(list, tensor=t),
    "dict-subclass": lambda t: annotated(Annotated, t),
    "ordered-dict-subclass": lambda t: annotated(AnnotatedOrdered, t),
    "nested": lambda t: {"outer": [Pair(t, t), (Output(t, "x"), {"inner": t})]},
}


class Recorder(nn.Module):
    """Returns what it was given, and remembers it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 1)
        self.seen: list[Any] = []

    def forward(self, value: Any, other: Any = None) -> Any:
        self.seen.append((value, other))
        return value


def tensors_in(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, Output):
        return tensors_in(value.tensor)
    if isinstance(value, dict):
        return [t for item in value.values() for t in tensors_in(item)]
    if isinstance(value, (list, tuple)):
        return [t for item in value for t in tensors_in(item)]
    return []


def shape_of(value: Any) -> Any:
    """Types, keys, attributes and everything that is no tensor."""
    if isinstance(value, torch.Tensor):
        return "tensor"
    if isinstance(value, Output):
        return (Output, shape_of(value.tensor), value.name)
    if isinstance(value, dict):
        items = [(key, shape_of(item)) for key, item in value.items()]
        return (type(value), items, getattr(value, "note", None))
    if isinstance(value, (list, tuple)):
        return (type(value), [shape_of(item) for item in value])
    return value


@pytest.mark.parametrize("make", CONTAINERS.values(), ids=CONTAINERS)
@pytest.mark.parametrize("opt_level", [*MASTER_LEVELS, "O3"])
def test_inputs_are_cast_on_entry_and_outputs_to_fp32_in_containers_of_the_same_type(
    opt_level: str, make: Callable[[torch.Tensor], Any]
) -> None:
    model, _ = initialized(opt_level, Recorder)
    given, keyword = make(torch.ones(2)), make(torch.zeros(2))
    result = model(given, other=keyword)
    (seen, seen_keyword) = model.seen[0]
    half_dtype = amp.OPT_LEVELS[opt_level].half_dtype
    assert {t.dtype for t in (*tensors_in(seen), *tensors_in(seen_keyword))} == {half_dtype}
    assert {t.dtype for t in tensors_in(result)} == {torch.float32}
    assert {t.dtype for t in tensors_in(given)} == {torch.float32}  # not mutated
    assert shape_of(seen) == shape_of(seen_keyword) == shape_of(result) == shape_of(given)


@pytest.mark.parametrize("make", CONTAINERS.values(), ids=CONTAINERS)
@pytest.mark.parametrize("opt_level", ["O0", "O1", "O4"])
def test_inputs_and_outputs_are_not_touched_where_the_model_is_not_cast(
    opt_level: str, make: Callable[[torch.Tensor], Any]
) -> None:
    model, _ = initialized(opt_level, Recorder)
    given = make(torch.ones(2))
    assert model(given) is given
    assert model.seen[0][0] is given


@pytest.mark.parametrize("opt_level", MASTER_LEVELS)
@pytest.mark.parametrize(
    "value",
    [torch.ones(2, dtype=torch.float64), torch.arange(3), torch.ones(2, dtype=torch.bool)],
    ids=lambda tensor: str(tensor.dtype),
)
def test_float64_and_integer_inputs_pass_as_they_are(opt_level: str, value: torch.Tensor) -> None:
    model, _ = initialized(opt_level, Recorder)
    assert model(value) is value


# -- O1 and O4 -------------------------------------------------------------------------------------


class CastCounter(TorchDispatchMode):
    """Counts the casts of each weight, found by its storage."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.names = {p.data_ptr(): name for name, p in model.named_parameters()}
        self.counts: Counter[str] = Counter()
        self.casts: list[int] = []  # weak references to their storages

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        is_cast = func is torch.ops.aten._to_copy.default
        if is_cast and kwargs.get("dtype") in (torch.float16, torch.bfloat16):
            name = self.names.get(args[0].data_ptr())
            if name is not None:
                self.counts[name] += 1
                self.casts.append(result.untyped_storage()._weak_ref())  # noqa: SLF001
        return result


class Repeated(nn.Module):
    """Uses one linear layer five times."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(5):
            x = torch.tanh(self.linear(x))
        return x


@pytest.mark.parametrize("opt_level", HALF_LEVELS)
def test_a_weight_is_cast_once_an_iteration_however_often_it_is_used(opt_level: str) -> None:
    model, optimizer = initialized(opt_level, Repeated)
    counter = CastCounter(model)
    for iteration in range(1, 4):
        optimizer.zero_grad()
        with counter:
            backward(model(batch()[0]).sum() * 2.0**-10, optimizer)
        optimizer.step()
        assert counter.counts == {"linear.weight": iteration, "linear.bias": iteration}


@pytest.mark.parametrize("opt_level", HALF_LEVELS)
def test_the_cache_is_empty_after_every_scale_loss(opt_level: str) -> None:
    model, optimizer = initialized(opt_level, Repeated)
    counter = CastCounter(model)
    for block in range(1, 4):  # three blocks of one iteration: no step and no zero_grad between
        with counter:
            backward(model(batch()[0]).sum(), optimizer)
        assert counter.counts == {"linear.weight": block, "linear.bias": block}


@pytest.mark.parametrize("opt_level", HALF_LEVELS)
def test_a_cast_is_freed_by_the_backward_pass_that_used_it(opt_level: str) -> None:
    model, optimizer = initialized(opt_level, Repeated)
    counter = CastCounter(model)
    with counter:
        loss = model(batch()[0]).sum() * 2.0**-10
    assert len(counter.casts) == 2
    is_freed = torch.UntypedStorage._expired  # noqa: SLF001
    assert not any(map(is_freed, counter.casts))
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
        assert all(map(is_freed, counter.casts))


@pytest.mark.parametrize("opt_level", HALF_LEVELS)
def test_without_gradients_the_cache_is_empty_after_every_forward(opt_level: str) -> None:
    model, _ = initialized(opt_level, Repeated)
    counter = CastCounter(model)
    for forward in range(1, 4):
        with counter, torch.no_grad():
            model(batch()[0])
        casts = forward + 1  # the first forward finds out that the layer is used twice
        assert counter.counts == {"linear.weight": casts, "linear.bias": casts}


@pytest.mark.parametrize("opt_level", HALF_LEVELS)
def test_a_cast_made_without_gradients_does_not_serve_a_forward_with_them(opt_level: str) -> None:
    model, optimizer = initialized(opt_level, Repeated)
    with torch.no_grad():
        F.linear(torch.ones(1, 6), model.linear.weight)  # outside of any forward
    backward(model(batch()[0]).sum() * 2.0**-10, optimizer)
    assert model.linear.weight.grad.abs().sum() > 0


def write_in_place(weight: nn.Parameter) -> None:
    with torch.no_grad():
        weight.fill_(2.0)


def write_through_data(weight: nn.Parameter) -> None:
    weight.data.fill_(2.0)


def write_by_assigning_data(weight: nn.Parameter) -> None:
    weight.data = torch.full_like(weight, 2.0)


def write_by_an_optimizer_that_amp_does_not_know(weight: nn.Parameter) -> None:
    weight.grad = torch.full_like(weight, -1.0)
    torch.optim.Adam([weight], lr=1.0, fused=True).step()  # moves no counter


def write_through_numpy(weight: nn.Parameter) -> None:
    weight.detach().numpy()[:] = 2.0
    amp.clear_cache()  # what nobody can see has to be said


@pytest.mark.parametrize(
    "write",
    [
        write_in_place,
        write_through_data,
        write_by_assigning_data,
        write_by_an_optimizer_that_amp_does_not_know,
        write_through_numpy,
    ],
    ids=lambda write: write.__name__.removeprefix("write_"),
)
def test_a_weight_that_is_written_to_is_cast_afresh(
    write: Callable[[nn.Parameter], None],
) -> None:
    initialized("O1")
    weight = nn.Parameter(torch.ones(3, 3))
    ones = torch.ones(1, 3)
    assert_identical(F.linear(ones, weight).detach(), torch.full((1, 3), 3.0).half())
    write(weight)
    assert_identical(F.linear(ones, weight).detach(), torch.full((1, 3), 6.0).half())


@pytest.mark.parametrize(("opt_level", "half_dtype"), HALF_LEVELS.items(), ids=HALF_LEVELS)
@pytest.mark.parametrize(
    ("operation", "is_half"),
    [
        pytest.param(lambda x: F.linear(x, x), True, id="linear"),
        pytest.param(lambda x: torch.matmul(x, x), True, id="matmul"),
        pytest.param(lambda x: x @ x, True, id="operator-matmul"),
        pytest.param(lambda x: torch.einsum("ij,jk->ik", x, x), True, id="einsum"),
        pytest.param(lambda x: F.conv1d(x[None], x[:, :, None]), True, id="conv1d"),
        pytest.param(lambda x: torch.softmax(x, 0), False, id="softmax"),
        pytest.param(lambda x: F.log_softmax(x, 0), False, id="log_softmax"),
        pytest.param(lambda x: x.exp(), False, id="exp"),
        pytest.param(lambda x: torch.log(input=x), False, id="log"),
        pytest.param(lambda x: x**3, False, id="pow"),
        pytest.param(lambda x: x.sum(), False, id="sum"),
        pytest.param(lambda x: F.mse_loss(x, x + 1), False, id="mse_loss"),
    ],
)
@pytest.mark.parametrize("given", [torch.float32, "half"], ids=str)
def test_listed_operations_run_in_half_or_in_fp32(
    opt_level: str,
    half_dtype: torch.dtype,
    operation: Callable[[torch.Tensor], torch.Tensor],
    is_half: bool,
    given: Any,
) -> None:
    initialized(opt_level)
    x = torch.ones(3, 3, dtype=half_dtype if given == "half" else given)
    assert operation(x).dtype is (half_dtype if is_half else torch.float32)


@pytest.mark.parametrize("opt_level", HALF_LEVELS)
def test_float64_is_computed_as_plain_torch_does(opt_level: str) -> None:
    initialized(opt_level)
    x = torch.full((2, 2), 1 / 3, dtype=torch.float64)
    assert_identical(x @ x, torch.full((2, 2), 2 * (1 / 3) ** 2, dtype=torch.float64))


@pytest.mark.parametrize("opt_level", HALF_LEVELS)
def test_weights_and_optimizer_state_stay_fp32_where_operations_are_cast(opt_level: str) -> None:
    model, optimizer = initialized(opt_level)
    train_step(model, optimizer, batch())
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
    assert {t.dtype for state in state_of(optimizer) for t in state.values()} == {torch.float32}


def product_dtype() -> torch.dtype:
    return torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype


def test_disable_casts_suspends_them_on_its_own_thread_only() -> None:
    initialized("O1")
    found: list[torch.dtype] = []
    inside, checked = threading.Event(), threading.Event()

    def suspend() -> None:
        with amp.disable_casts():
            inside.set()
            checked.wait(10)
            found.append(product_dtype())
        found.append(product_dtype())

    thread = threading.Thread(target=suspend)
    thread.start()
    inside.wait(10)
    found.append(product_dtype())
    checked.set()
    thread.join()
    assert found == [torch.float16, torch.float32, torch.float16]


def test_casts_hold_on_threads_that_start_while_another_has_suspended_them() -> None:
    initialized("O1")
    found: list[torch.dtype] = []
    with amp.disable_casts():
        thread = threading.Thread(target=lambda: found.append(product_dtype()))
        thread.start()
        thread.join()
        found.append(product_dtype())
    assert found == [torch.float16, torch.float32]


@pytest.mark.parametrize("opt_level", LEVELS)
def test_many_threads_compute_the_same_as_one(opt_level: str) -> None:
    model, _ = initialized(opt_level)
    model.eval()
    inputs = batch()[0]
    expected = model(inputs).detach()
    found: list[torch.Tensor] = []

    def compute() -> None:
        for _ in range(5):
            found.append(model(inputs).detach())
            with amp.disable_casts():
                assert product_dtype() is torch.float32

    threads = [threading.Thread(target=compute) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert_identical(found, [expected] * 20)


def test_disable_casts_works_as_a_decorator_and_without_a_session() -> None:
    decorated = amp.disable_casts()(product_dtype)
    assert decorated() is torch.float32
    initialized("O1")
    assert decorated() is torch.float32
    assert product_dtype() is torch.float16


# -- O2 and O5 -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("opt_level", "half_dtype"), MASTER_LEVELS.items(), ids=MASTER_LEVELS)
@pytest.mark.parametrize("dimension", BATCH_NORMS)
@pytest.mark.parametrize("affine", [True, False], ids=["affine", "plain"])
def test_batch_norm_and_its_statistics_stay_fp32(
    opt_level: str, half_dtype: torch.dtype, dimension: int, affine: bool
) -> None:
    kind, shape = BATCH_NORMS[dimension]
    model = nn.Sequential(kind(3, affine=affine), nn.Linear(5, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level=opt_level)
    norm = model[0]
    assert {t.dtype for t in norm.parameters()} <= {torch.float32}
    assert norm.running_mean.dtype is norm.running_var.dtype is torch.float32
    assert norm.num_batches_tracked.dtype is torch.int64
    assert model[1].weight.dtype is half_dtype
    inputs = torch.randn(shape)
    model(inputs)
    flat = inputs.to(half_dtype).double().transpose(0, 1).flatten(1)
    # Torch's definition: 0.9 of the old value, 0.1 of the new one. In FP32, of the rounded inputs.
    expected = 0.1 * flat.mean(1)
    torch.testing.assert_close(norm.running_mean.double(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(
        norm.running_var.double(), 0.9 + 0.1 * flat.var(1), rtol=1e-5, atol=1e-6
    )
    optimizer.zero_grad()


def test_o3_casts_batch_norm_and_has_no_masters() -> None:
    model, optimizer = initialized("O3")
    tensors = [*model.parameters(), *(b for b in model.buffers() if b.is_floating_point())]
    assert {t.dtype for t in tensors} == {torch.float16}
    assert [id(p) for p in amp.master_params(optimizer)] == [id(p) for p in model.parameters()]
    train_step(model, optimizer, batch())
    assert {t.dtype for state in state_of(optimizer) for t in state.values()} == {torch.float16}


def test_o3_warns_of_an_eps_that_is_0_in_float16() -> None:
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), eps=1e-8)
    with pytest.warns(amp.AmpWarning, match="eps=1e-08 of Adam is 0 in float16.*1e-4") as caught:
        amp.initialize(model, optimizer, opt_level="O3")
    assert caught[0].filename == __file__


@pytest.mark.parametrize("opt_level", ["O0", "O1", "O2", "O4", "O5"])
def test_other_levels_do_not_warn_of_eps(opt_level: str) -> None:
    model = mlp()
    amp.initialize(model, torch.optim.Adam(model.parameters(), eps=1e-8), opt_level=opt_level)


@pytest.mark.parametrize(("opt_level", "half_dtype"), MASTER_LEVELS.items(), ids=MASTER_LEVELS)
def test_masters_are_the_weights_as_they_were_before_rounding(
    opt_level: str, half_dtype: torch.dtype
) -> None:
    model = normalised_mlp()
    original = [p.detach().clone() for p in model.parameters()]
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    amp.initialize(model, optimizer, opt_level=opt_level)
    masters = list(amp.master_params(optimizer))
    assert_identical([m.detach() for m in masters], original)
    assert all(master.is_leaf and master.requires_grad for master in masters)
    assert model[0].weight.dtype is half_dtype
    assert_identical(model[0].weight.detach(), original[0].to(half_dtype))
    assert masters[0] is not model[0].weight
    assert masters[1] is model[1].weight  # BatchNorm is its own master


@pytest.mark.parametrize("opt_level", MASTER_LEVELS)
@pytest.mark.parametrize("factory", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_optimizer_state_is_fp32_and_model_follows_masters(
    opt_level: str, factory: OptimizerFactory
) -> None:
    model = normalised_mlp()
    optimizer = factory(model.parameters())
    amp.initialize(model, optimizer, opt_level=opt_level, loss_scale=128.0)
    for _ in range(3):
        train_step(model, optimizer, batch())
        for parameter, master in zip(model.parameters(), amp.master_params(optimizer), strict=True):
            assert_identical(parameter.detach(), master.detach().to(parameter.dtype))
            if master is not parameter:  # step clears the gradients of the masters
                assert parameter.grad is None
                assert master.grad is None
    states = state_of(optimizer)
    assert all(states)
    assert {t.dtype for state in states for t in state.values()} == {torch.float32}


@pytest.mark.parametrize("opt_level", MASTER_LEVELS)
def test_state_dict_gives_the_exact_masters_in_fp32(opt_level: str) -> None:
    model, optimizer = initialized(opt_level, loss_scale=128.0)
    original = {name: t.clone() for name, t in normalised_mlp().state_dict().items()}
    train_step(model, optimizer, batch())
    saved = model.state_dict()
    assert saved.keys() == original.keys()
    assert [t.dtype for t in saved.values()] == [t.dtype for t in original.values()]
    names = [name for name, _ in model.named_parameters()]
    masters = [master.detach() for master in amp.master_params(optimizer)]
    assert_identical([saved[name] for name in names], masters)
    assert not any(t.requires_grad for t in saved.values())


@pytest.mark.parametrize(("opt_level", "half_dtype"), MASTER_LEVELS.items(), ids=MASTER_LEVELS)
def test_load_state_dict_sets_masters_and_model(opt_level: str, half_dtype: torch.dtype) -> None:
    source = normalised_mlp().state_dict()
    source["1.running_mean"] += 1 / 3
    model, optimizer = initialized(opt_level)
    model.load_state_dict(source)
    names = [name for name, _ in model.named_parameters()]
    masters = [master.detach() for master in amp.master_params(optimizer)]
    assert_identical(masters, [source[name] for name in names])
    assert_identical(model[0].weight.detach(), source["0.weight"].to(half_dtype))
    assert_identical(dict(model.state_dict()), dict(source))


@pytest.mark.parametrize("opt_level", [*MASTER_LEVELS, "O3"])
def test_a_state_dict_of_a_part_of_the_model_is_fp32_too(opt_level: str) -> None:
    model, _ = initialized(opt_level)
    whole, part = model.state_dict(), model[3].state_dict()
    assert_identical(dict(part), {name: whole[f"3.{name}"] for name in part})
    assert {t.dtype for t in part.values()} == {torch.float32}


@pytest.mark.parametrize("opt_level", MASTER_LEVELS)
def test_weights_written_into_the_model_reach_the_masters(opt_level: str) -> None:
    model, optimizer = initialized(opt_level, loss_scale=128.0)
    before = model.state_dict()["3.bias"].clone()
    with torch.no_grad():
        model[3].weight.fill_(0.25)
        model[3].bias[1] = 0.5
    saved = model.state_dict()
    assert_identical(saved["3.weight"], torch.full((3, 8), 0.25))
    # Only the written element is taken over: the others keep what rounding would have lost.
    assert_identical(saved["3.bias"], torch.stack([before[0], torch.tensor(0.5), before[2]]))
    train_step(model, optimizer, batch())
    trained = model.state_dict()["3.weight"]
    assert 0 < (trained - 0.25).abs().max() < 0.2


@pytest.mark.parametrize("opt_level", MASTER_LEVELS)
def test_weights_written_into_the_model_are_stepped_from(opt_level: str) -> None:
    model, optimizer = initialized(opt_level, lambda: nn.Linear(1, 1, bias=False), loss_scale=2.0)
    with torch.no_grad():
        model.weight.fill_(0.25)
    backward(model(torch.ones(1, 1)).sum(), optimizer)
    optimizer.step()  # the gradient is 1, the learning rate 0.1
    assert model.state_dict()["weight"].item() == pytest.approx(0.15, rel=2**-22)


@pytest.mark.parametrize("opt_level", MASTER_LEVELS)
def test_gradients_are_on_the_masters_after_a_block(opt_level: str) -> None:
    model, optimizer = initialized(opt_level)
    backward(model(batch()[0]).sum() * 2.0**-10, optimizer)
    for parameter, master in zip(model.parameters(), amp.master_params(optimizer), strict=True):
        assert master.grad.dtype is torch.float32
        assert parameter is master or parameter.grad is None


class Tied(nn.Module):
    """One weight under two names; the second module holds nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(indices))


@pytest.mark.parametrize("opt_level", MASTER_LEVELS)
def test_a_tied_weight_has_one_master_and_is_exact_under_both_names(opt_level: str) -> None:
    model = Tied()
    original = model.head.weight.detach().clone()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    amp.initialize(model, optimizer, opt_level=opt_level, loss_scale=128.0)
    assert len(list(amp.master_params(optimizer))) == 1
    assert model.head.weight is model.embedding.weight
    names = "embedding.weight", "head.weight"
    assert_identical(dict(model.state_dict()), dict.fromkeys(names, original))
    backward(model(torch.tensor([1, 2])).sum(), optimizer)
    optimizer.step()
    (master,) = amp.master_params(optimizer)
    assert_identical(dict(model.state_dict()), dict.fromkeys(names, master.detach()))
    assert not torch.equal(master, original)


@pytest.mark.parametrize("opt_level", MASTER_LEVELS)
def test_a_state_dict_of_the_second_owner_of_a_tied_weight_sets_the_master(opt_level: str) -> None:
    model = Tied()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    amp.initialize(model, optimizer, opt_level=opt_level)
    value = torch.full((6, 4), 1 / 3)
    model.head.load_state_dict({"weight": value})
    (master,) = amp.master_params(optimizer)
    assert_identical(master.detach(), value)


# -- copies ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("opt_level", LEVELS)
def test_a_deep_copy_of_a_model_is_independent_and_computes_the_same(opt_level: str) -> None:
    model, optimizer = initialized(opt_level)
    train_step(model, optimizer, batch())
    twin = copy.deepcopy(model)
    saved, inputs = {k: v.clone() for k, v in model.state_dict().items()}, batch()[0]
    model.eval()
    twin.eval()
    expected = model(inputs).detach()
    assert_identical(twin(inputs).detach(), expected)
    assert_identical(dict(twin.state_dict()), saved)
    twin.load_state_dict({name: torch.zeros_like(t) for name, t in saved.items()})
    assert_identical(dict(model.state_dict()), saved)
    assert_identical(model(inputs).detach(), expected)
    assert_identical(
        dict(twin.state_dict()), {name: torch.zeros_like(t) for name, t in saved.items()}
    )
    train_step(model.train(), optimizer, batch())
    assert_identical(
        dict(twin.state_dict()), {name: torch.zeros_like(t) for name, t in saved.items()}
    )


@pytest.mark.parametrize("opt_level", LEVELS)
def test_a_deep_copy_of_an_optimizer_is_independent(opt_level: str) -> None:
    model, optimizer = initialized(opt_level, loss_scale=128.0)
    train_step(model, optimizer, batch())
    twin = copy.deepcopy(optimizer)
    before = snapshot(model, optimizer)
    assert_identical(state_of(twin), before["state"])
    parameters = [p for group in twin.param_groups for p in group["params"]]
    assert_identical([p.detach() for p in parameters], before["updated"])
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    twin.step()
    assert_identical(snapshot(model, optimizer), before)
    assert not any(
        torch.equal(p, old) for p, old in zip(parameters, before["updated"], strict=True)
    )
    with pytest.raises(amp.AmpError, match="a copy or a new one"):
        list(amp.master_params(twin))


@pytest.mark.parametrize("opt_level", MASTER_LEVELS)
def test_a_copy_of_model_and_optimizer_together_trains_on_by_itself(opt_level: str) -> None:
    model, optimizer = initialized(opt_level, mlp, loss_scale=128.0)
    train_step(model, optimizer, batch())
    saved = {k: v.clone() for k, v in model.state_dict().items()}
    twin, twin_optimizer = copy.deepcopy((model, optimizer))
    masters = [p.detach() for group in twin_optimizer.param_groups for p in group["params"]]
    assert_identical(masters, list(saved.values()))
    assert_identical(dict(twin.state_dict()), saved)
    train_step(model, optimizer, batch())
    assert_identical(dict(twin.state_dict()), saved)
