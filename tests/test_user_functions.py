"""Functions of the user: decorators, and registrations by module and name."""

from __future__ import annotations

import dataclasses
import inspect
import pickle
import sys
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from networks import assert_identical
from torch import nn

import amp_patch as amp
from amp_patch.casts.user_functions import user_rules

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
LEVELS = {"O1": FP16, "O4": BF16}
DECORATORS = {
    "half": amp.half_function,
    "float": amp.float_function,
    "promote": amp.promote_function,
}
REGISTRATIONS = {
    "half": amp.register_half_function,
    "float": amp.register_float_function,
    "promote": amp.register_promote_function,
}


@pytest.fixture(autouse=True)
def _forgets_registrations() -> Iterator[None]:
    yield
    for row in user_rules.rows():
        amp.unregister_function(row.owner, row.name)


@pytest.fixture
def model() -> nn.Module:
    """The casts are active as long as it lives."""
    return amp.initialize(nn.Linear(4, 4), opt_level="O4", verbosity=0)


def dtypes_of(*tensors: torch.Tensor) -> list[torch.dtype]:
    return [tensor.dtype for tensor in tensors]


def floats(*dtypes: torch.dtype) -> list[torch.Tensor]:
    return [torch.ones(2, dtype=dtype) for dtype in dtypes]


# -- decorators -----------------------------------------------------------------------------------


@pytest.mark.parametrize("opt_level", LEVELS)
def test_each_decorator_casts_by_its_rule(opt_level: str) -> None:
    half = LEVELS[opt_level]
    model = amp.initialize(nn.Linear(4, 4), opt_level=opt_level, verbosity=0)
    mixed = floats(FP32, half)
    assert amp.half_function(dtypes_of)(*mixed) == [half, half]
    assert amp.float_function(dtypes_of)(*mixed) == [FP32, FP32]
    assert amp.promote_function(dtypes_of)(*mixed) == [FP32, FP32]
    assert amp.promote_function(dtypes_of)(*floats(half, half)) == [half, half]
    assert amp.promote_function(dtypes_of)(*floats(FP16, BF16)) == [FP32, FP32]
    del model


@pytest.mark.parametrize("kind", DECORATORS)
def test_other_dtypes_pass(kind: str, model: nn.Module) -> None:
    others = [torch.float64, torch.complex64, torch.int64, torch.bool, torch.uint8]
    assert DECORATORS[kind](dtypes_of)(*floats(*others)) == others


class Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


@dataclasses.dataclass
class Batch:
    features: torch.Tensor
    extra: dict[str, Any]
    name: str = "batch"


def test_nested_arguments_are_cast_and_keep_their_types(model: nn.Module) -> None:
    @amp.half_function
    def leaves(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        return args, kwargs

    x, ids = torch.ones(2), torch.ones(2, dtype=torch.int64)
    given = {
        "deep": [x, (x, {"k": x, "ids": ids})],
        "pair": Pair(x, ids),
        "text": "t",
        "none": None,
    }
    batch = Batch(x, {"list": [x]})
    (listed, found), keywords = leaves([x], batch, **given)
    assert listed[0].dtype is BF16
    assert type(found) is Batch
    assert found.features.dtype is found.extra["list"][0].dtype is BF16
    assert found.name == "batch"
    assert keywords["deep"][1][1]["k"].dtype is BF16
    assert keywords["deep"][1][1]["ids"] is ids
    assert type(keywords["pair"]) is Pair
    assert keywords["pair"].first.dtype is BF16
    assert keywords["text"] == "t"
    # Nothing of the caller's was changed.
    assert given["deep"][0] is x
    assert given["deep"][1][1]["k"] is x
    assert batch.features is batch.extra["list"][0] is x


def test_float_function_runs_in_fp32_throughout(model: nn.Module) -> None:
    @amp.float_function
    def gram(x: torch.Tensor) -> torch.Tensor:
        return x @ x.t()

    x = torch.randn(4, 4)
    assert gram(x).dtype is FP32
    with amp.disable_casts():
        expected = x @ x.t()
    assert_identical(gram(x), expected)


def test_operations_inside_half_function_are_cast_as_ever(model: nn.Module) -> None:
    @amp.half_function
    def both(x: torch.Tensor) -> tuple[torch.dtype, torch.dtype]:
        return (x @ x).dtype, x.exp().dtype

    assert both(torch.ones(2, 2)) == (BF16, FP32)


class Methods:
    @amp.half_function
    def plain(self, x: torch.Tensor) -> tuple[Any, torch.dtype]:
        return self, x.dtype

    @amp.half_function
    @staticmethod
    def over_static(x: torch.Tensor) -> tuple[Any, torch.dtype]:
        return None, x.dtype

    @staticmethod
    @amp.half_function
    def under_static(x: torch.Tensor) -> tuple[Any, torch.dtype]:
        return None, x.dtype

    @amp.half_function
    @classmethod
    def over_class(cls, x: torch.Tensor) -> tuple[Any, torch.dtype]:
        return cls, x.dtype

    @classmethod
    @amp.half_function
    def under_class(cls, x: torch.Tensor) -> tuple[Any, torch.dtype]:
        return cls, x.dtype


METHODS = {
    "plain": "object",
    "over_static": None,
    "under_static": None,
    "over_class": "class",
    "under_class": "class",
}


@pytest.mark.parametrize("name", METHODS)
def test_methods_of_every_kind_are_cast_from_either_side(name: str, model: nn.Module) -> None:
    one = Methods()
    bound = {"object": one, "class": Methods, None: None}[METHODS[name]]
    assert getattr(one, name)(torch.ones(2)) == (bound, BF16)
    if METHODS[name] != "object":
        assert getattr(Methods, name)(torch.ones(2)) == (bound, BF16)


def test_decorated_function_keeps_its_name_doc_and_signature() -> None:
    def measure(x: torch.Tensor, *, scale: float = 2.0) -> torch.Tensor:
        """The measure."""
        return x * scale

    decorated = amp.half_function(measure)
    assert decorated.__name__ == "measure"
    assert decorated.__doc__ == "The measure."
    assert inspect.signature(decorated) == inspect.signature(measure)


def test_forward_of_a_module_can_be_decorated(model: nn.Module) -> None:
    class Precise(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        @amp.float_function
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x)

    precise = Precise()
    assert precise(model(torch.ones(1, 4))).dtype is FP32
    assert precise(torch.ones(1, 4)).requires_grad


@pytest.mark.parametrize("kind", DECORATORS)
@pytest.mark.parametrize("opt_level", ["none", "disabled", "O0", "O2", "O3", "O5"])
def test_decorators_do_nothing_where_no_casts_are_active(opt_level: str, kind: str) -> None:
    kept = None
    if opt_level == "disabled":
        kept = amp.initialize(nn.Linear(1, 1), enabled=False)
    elif opt_level != "none":
        kept = amp.initialize(nn.Linear(1, 1), opt_level=opt_level, verbosity=0)
    mixed = floats(FP32, FP16, BF16)
    assert DECORATORS[kind](dtypes_of)(*mixed) == [FP32, FP16, BF16]
    del kept


@pytest.mark.parametrize("kind", DECORATORS)
def test_decorators_do_nothing_inside_disable_casts(kind: str, model: nn.Module) -> None:
    with amp.disable_casts():
        assert DECORATORS[kind](dtypes_of)(*floats(FP32, BF16)) == [FP32, BF16]


@pytest.mark.parametrize("opt_level", ["none", "disabled", "O0", "O1", "O2", "O3", "O4", "O5"])
def test_disable_casts_can_stand_in_any_script(opt_level: str) -> None:
    kept = None
    if opt_level == "disabled":
        kept = amp.initialize(nn.Linear(1, 1), enabled=False)
    elif opt_level != "none":
        kept = amp.initialize(nn.Linear(1, 1), opt_level=opt_level, verbosity=0)

    @amp.disable_casts()
    def product() -> torch.dtype:
        with amp.disable_casts():
            return torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype

    assert product() is FP32
    with pytest.raises(ValueError, match="inside"), amp.disable_casts():
        raise ValueError("inside")
    assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype is LEVELS.get(opt_level, FP32)
    del kept


@pytest.mark.parametrize("kind", DECORATORS)
def test_decorating_what_is_no_function_is_an_error(kind: str) -> None:
    with pytest.raises(amp.AmpError, match=f"{kind}_function: expected a function, found 3"):
        DECORATORS[kind](3)


def test_weights_given_to_a_decorated_function_are_cast_once_an_iteration(
    model: nn.Module,
) -> None:
    seen = []

    @amp.half_function
    def keep(weight: torch.Tensor) -> None:
        seen.append(weight)

    keep(model.weight)
    keep(model.weight)
    assert seen[0] is seen[1]
    assert seen[0].requires_grad


# -- registrations --------------------------------------------------------------------------------


@pytest.fixture
def library() -> types.ModuleType:
    """A module of somebody else."""
    module = types.ModuleType("somebodys_library")
    module.dtypes_of = dtypes_of

    class Layer:
        def method(self, x: torch.Tensor) -> torch.dtype:
            return x.dtype

        @staticmethod
        def static(x: torch.Tensor) -> torch.dtype:
            return x.dtype

        @classmethod
        def of_class(cls, x: torch.Tensor) -> torch.dtype:
            return x.dtype

    module.Layer = Layer
    return module


EXPECTED = {"half": [BF16, BF16], "float": [FP32, FP32], "promote": [FP32, FP32]}


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("kind", REGISTRATIONS)
def test_registration_is_effective_at_once_and_reversible(
    kind: str, order: str, library: types.ModuleType
) -> None:
    register = REGISTRATIONS[kind]
    if order == "before":
        register(library, "dtypes_of")
        assert library.dtypes_of is dtypes_of
    model = amp.initialize(nn.Linear(1, 1), opt_level="O4", verbosity=0)
    if order == "after":
        assert library.dtypes_of(*floats(FP32, BF16)) == [FP32, BF16]
        register(library, "dtypes_of")
    assert library.dtypes_of(*floats(FP32, BF16)) == EXPECTED[kind]
    with amp.disable_casts():
        assert library.dtypes_of(*floats(FP32, BF16)) == [FP32, BF16]
    amp.unregister_function(library, "dtypes_of")
    assert library.dtypes_of is dtypes_of
    register(library, "dtypes_of")
    amp.uninitialize()
    assert library.dtypes_of is dtypes_of
    del model


def test_registration_outlives_the_session(library: types.ModuleType) -> None:
    amp.register_half_function(library, "dtypes_of")
    for _ in range(2):
        model = amp.initialize(nn.Linear(1, 1), opt_level="O4", verbosity=0)
        assert library.dtypes_of(*floats(FP32)) == [BF16]
        amp.uninitialize()
        del model


@pytest.mark.parametrize("name", ["method", "static", "of_class"])
def test_registration_reaches_methods_of_every_kind(
    name: str, library: types.ModuleType, model: nn.Module
) -> None:
    original = vars(library.Layer)[name]
    amp.register_half_function(library.Layer, name)
    assert getattr(library.Layer(), name)(torch.ones(1)) is BF16
    if name != "method":
        assert getattr(library.Layer, name)(torch.ones(1)) is BF16
    amp.unregister_function(library.Layer, name)
    assert vars(library.Layer)[name] is original


def test_last_registration_wins_with_a_warning(library: types.ModuleType, model: nn.Module) -> None:
    amp.register_half_function(library, "dtypes_of")
    amp.register_half_function(library, "dtypes_of")  # says the same: no warning
    with pytest.warns(amp.AmpWarning, match="registered as HALF and is FLOAT from now on"):
        amp.register_float_function(library, "dtypes_of")
    assert library.dtypes_of(*floats(BF16)) == [FP32]


def test_registration_goes_before_the_rule_of_torch(model: nn.Module) -> None:
    a = torch.ones(2, 2)
    amp.register_float_function(torch, "mm")
    amp.register_half_function(torch, "exp")
    assert torch.mm(a, a).dtype is FP32
    assert torch.exp(a).dtype is BF16
    amp.unregister_function(torch, "mm")
    amp.unregister_function(torch, "exp")
    assert torch.mm(a, a).dtype is BF16
    assert torch.exp(a).dtype is FP32


def test_registration_of_an_operation_honours_out_and_in_place(model: nn.Module) -> None:
    amp.register_half_function(torch, "tanh")
    out = torch.empty(2)
    assert torch.tanh(torch.ones(2), out=out) is out
    assert out.tolist() == pytest.approx([0.7616] * 2, abs=1e-2)
    amp.register_float_function(torch, "sigmoid_")
    half = torch.zeros(2, dtype=BF16)
    assert torch.sigmoid_(half) is half
    assert half.tolist() == [0.5, 0.5]


def test_registration_of_a_python_function_of_torch(model: nn.Module) -> None:
    amp.register_float_function(F, "softsign")
    assert F.softsign(torch.ones(2, dtype=BF16)).dtype is FP32


def test_registration_of_a_tensor_method_casts_the_tensor_itself(model: nn.Module) -> None:
    amp.register_half_function(torch.Tensor, "tanh")
    assert torch.ones(2).tanh().dtype is BF16
    amp.unregister_function(torch.Tensor, "tanh")
    assert "tanh" not in vars(torch.Tensor)


@pytest.fixture
def operator_library() -> Iterator[Any]:
    with torch.library._scoped_library("amp_patch_test", "FRAGMENT") as fragment:  # noqa: SLF001
        fragment.define("double(Tensor x) -> Tensor")
        fragment.impl("double", lambda x: x * 2, "CompositeImplicitAutograd")
        yield torch.ops.amp_patch_test
        vars(torch.ops.amp_patch_test).pop("double", None)


def test_registration_of_an_operation_of_torch_ops(operator_library: Any, model: nn.Module) -> None:
    assert operator_library.double(torch.ones(2)).dtype is FP32
    amp.register_half_function(torch.ops.amp_patch_test, "double")
    assert torch.ops.amp_patch_test.double(torch.ones(2)).dtype is BF16
    amp.unregister_function(torch.ops.amp_patch_test, "double")
    assert torch.ops.amp_patch_test.double(torch.ones(2)).dtype is FP32


def test_names_imported_elsewhere_are_cast_as_well(
    monkeypatch: pytest.MonkeyPatch, library: types.ModuleType, model: nn.Module
) -> None:
    user = types.ModuleType("somebodys_script")
    user.renamed = dtypes_of
    monkeypatch.setitem(sys.modules, "somebodys_script", user)
    amp.register_half_function(library, "dtypes_of")
    assert user.renamed(*floats(FP32)) == [BF16]
    amp.unregister_function(library, "dtypes_of")
    assert user.renamed is dtypes_of


@pytest.mark.parametrize("kind", REGISTRATIONS)
def test_registration_of_what_is_not_there_is_an_error(
    kind: str, library: types.ModuleType
) -> None:
    with pytest.raises(amp.AmpError, match="'nothing', which is not there"):
        REGISTRATIONS[kind](library, "nothing")
    with pytest.raises(amp.AmpError, match="expected a module or class"):
        REGISTRATIONS[kind]("torch", "mm")
    library.number = 3
    with pytest.raises(amp.AmpError, match="'number', which is 3"):
        REGISTRATIONS[kind](library, "number")


def test_unregistering_twice_is_an_error(library: types.ModuleType) -> None:
    amp.register_half_function(library, "dtypes_of")
    amp.unregister_function(library, "dtypes_of")
    with pytest.raises(amp.AmpError, match="expected a function that was registered"):
        amp.unregister_function(library, "dtypes_of")


def test_registered_operation_pickles_by_its_name(model: nn.Module) -> None:
    amp.register_half_function(torch, "tanh")
    assert pickle.loads(pickle.dumps(torch.tanh)) is torch.tanh  # noqa: S301
