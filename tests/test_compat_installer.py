"""The names of apex in a process: there on request, gone by the undo."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

import amp_patch
from amp_patch import AmpError
from amp_patch.compat.installer import install_as_apex
from amp_patch.compat.names import NAMES


@pytest.fixture
def undo() -> Iterator[Callable[[], None]]:
    undo = install_as_apex()
    yield undo
    undo()


def apex_modules() -> list[str]:
    return [name for name in sys.modules if name.partition(".")[0] in ("apex", "amp_C")]


def test_nothing_is_there_before_it_is_asked_for() -> None:
    assert apex_modules() == []
    assert importlib.util.find_spec("apex") is None
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("apex")


def test_undo_leaves_the_process_as_it_was() -> None:
    modules, finders = set(sys.modules), list(sys.meta_path)
    undo = install_as_apex()
    importlib.import_module("apex.amp")
    undo()
    undo()
    new = {name for name in set(sys.modules) - modules if not name.startswith(("torch", "amp_"))}
    assert [name for name in new if "apex" in name] == []
    assert sys.meta_path == finders
    assert importlib.util.find_spec("apex") is None
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("apex")


def test_second_installation_changes_nothing(undo: Callable[[], None]) -> None:
    module = sys.modules["apex.amp"]
    install_as_apex()
    assert sys.modules["apex.amp"] is module


def test_names_can_be_installed_again_after_the_undo() -> None:
    install_as_apex()()
    undo = install_as_apex()
    assert hasattr(importlib.import_module("apex.amp"), "initialize")
    undo()


def test_real_apex_is_not_replaced_unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    real = ModuleType("apex")
    monkeypatch.setitem(sys.modules, "apex", real)
    with pytest.raises(AmpError, match="expected that no apex is imported"):
        install_as_apex()
    assert sys.modules["apex"] is real
    undo = install_as_apex(replace=True)
    assert sys.modules["apex"] is not real
    undo()
    assert sys.modules["apex"] is real
    assert apex_modules() == ["apex"]


def test_probes_find_the_package(undo: Callable[[], None]) -> None:
    assert importlib.util.find_spec("apex") is not None
    assert importlib.util.find_spec("apex.amp") is not None
    assert importlib.util.find_spec("apex.transformer") is None
    assert importlib.util.find_spec("amp_C") is None
    assert importlib.metadata.version("apex") == "0.1"
    assert importlib.metadata.version("torch") == importlib.metadata.distribution("torch").version
    assert "apex" in {one.metadata["Name"] for one in importlib.metadata.distributions()}


@pytest.mark.parametrize("name", NAMES)
def test_module_can_be_imported(name: str, undo: Callable[[], None]) -> None:
    module = importlib.import_module(name)
    assert module.__spec__ is not None
    assert module.__spec__.name == name
    for attribute in NAMES[name]:
        assert attribute in vars(module)


def test_state_is_an_object_that_shadows_its_module(undo: Callable[[], None]) -> None:
    exec("import apex.amp._amp_state as x, apex.amp._amp_state", namespace := {})  # noqa: S102
    state = namespace["apex"].amp._amp_state  # noqa: SLF001 (the name that scripts use)
    assert hasattr(state, "opt_properties") is False
    state.verbosity = 0
    module = sys.modules["apex.amp._amp_state"]
    assert vars(module)["_amp_state"] is state
    assert namespace["x"] is state


def test_module_is_an_attribute_of_its_package_unless_apex_put_its_own_in_that_place(
    undo: Callable[[], None],
) -> None:
    shadowed = {"apex.amp._amp_state", "apex.parallel.LARC"}  # by the __init__ of these packages
    for name in NAMES.keys() - shadowed - {"apex"}:
        package, _, own = name.rpartition(".")
        assert getattr(importlib.import_module(package), own) is sys.modules[name], name


def test_functions_are_in_the_dict_of_the_module(undo: Callable[[], None]) -> None:
    amp = importlib.import_module("apex.amp")
    assert "state_dict" in amp.__dict__
    assert "load_state_dict" in amp.__dict__


def test_signature_shows_named_defaults(undo: Callable[[], None]) -> None:
    found = inspect.getfullargspec(importlib.import_module("apex.amp").initialize)
    assert found.args[:4] == ["models", "optimizers", "enabled", "opt_level"]
    defaults = dict(zip(reversed(found.args), reversed(found.defaults or ()), strict=False))
    assert defaults.pop("max_loss_scale") == 2.0**24
    assert defaults.pop("opt_level") == "O1"
    assert found.kwonlyargs == []
    assert found.varkw is None
    model = torch.nn.Linear(2, 1)
    initialize = importlib.import_module("apex.amp").initialize
    assert initialize(model, opt_level="O1", max_loss_scale=2.0**20, **defaults) is model


MISSING = {
    "from apex.contrib.multihead_attn import SelfMultiheadAttn": "torch.nn.MultiheadAttention",
    "from apex.contrib.optimizers import DistributedFusedAdam": "fully_shard",
    "from apex.optimizers import FP16_Optimizer": "apex.contrib.optimizers.FP16_Optimizer",
    "from apex import RNN": "torch.nn.LSTM",
    "import apex.reparameterization": "weight_norm",
    "import apex.transformer.pipeline_parallel": "megatron",
    "import amp_C": "torch._foreach_",
    "import fused_layer_norm_cuda": "torch.nn.functional.layer_norm",
    "from apex.amp import nothing_of_the_kind": "amp_patch.compat.names",
}


@pytest.mark.parametrize("statement", MISSING)
def test_what_does_not_exist_names_its_replacement(
    statement: str, undo: Callable[[], None]
) -> None:
    with pytest.raises(ImportError, match="not among the names") as caught:
        exec(statement, {})  # noqa: S102
    assert MISSING[statement] in str(caught.value)


def test_module_of_the_user_goes_before_a_hint(
    undo: Callable[[], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mlp_cuda.py").write_text("VALUE = 3\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        assert importlib.import_module("mlp_cuda").VALUE == 3
    finally:
        sys.modules.pop("mlp_cuda", None)


def test_missing_attribute_is_an_attribute_error(undo: Callable[[], None]) -> None:
    assert not hasattr(importlib.import_module("apex"), "RNN")


def test_every_name_of_apex_amp_is_in_the_module_for_migrated_scripts() -> None:
    face = importlib.import_module("amp_patch.compat.apex_amp")
    undo = install_as_apex()
    amp = importlib.import_module("apex.amp")
    assert NAMES["apex.amp"].keys() <= set(face.__all__)
    assert {name for name in face.__all__ if getattr(face, name) is not getattr(amp, name)} == {
        "lists"  # a module here, and one of the names of apex there
    }
    undo()


def test_package_imports_no_companion_by_itself() -> None:
    assert amp_patch.__file__ is not None
    installer = importlib.import_module("amp_patch.compat.installer")
    source = inspect.getsource(installer)
    assert "import torch" not in source
