"""The leak check itself: it sees what is left behind, and lets pass what is not a leak."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from process_state import ProcessState
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
    register_module_full_backward_hook,
)
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

import amp_patch as amp

PATCHED = {
    "module": (torch, "matmul"),
    "functional": (torch.nn.functional, "linear"),
    "bindings": (torch._C._nn, "gelu"),
    "recurrent-bindings": (torch._VF, "lstm"),
    "own-method": (torch.Tensor, "norm"),
    "inherited-method": (torch.Tensor, "add"),
    "recurrent-class": (torch.nn.RNNBase, "check_input"),
    "new-name": (torch.linalg, "a_name_that_is_not_there"),
}


@pytest.mark.parametrize(("owner", "name"), PATCHED.values(), ids=PATCHED.keys())
def test_replaced_attribute_is_seen_until_it_is_put_back(
    owner: object, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = ProcessState.capture()
    monkeypatch.setattr(owner, name, lambda: None, raising=False)
    (found,) = before.differences(ProcessState.capture())
    assert f".{name} was " in found
    monkeypatch.undo()
    assert before.differences(ProcessState.capture()) == []


def test_inherited_method_put_back_by_assignment_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    before = ProcessState.capture()
    monkeypatch.setattr(torch.Tensor, "add", torch.Tensor.add)
    (found,) = before.differences(ProcessState.capture())
    assert found.startswith("attribute torch.Tensor.add was absent, is <method 'add'")


HOOKS: dict[str, Callable[[Callable[..., None]], torch.utils.hooks.RemovableHandle]] = {
    "forward-pre": register_module_forward_pre_hook,
    "forward": register_module_forward_hook,
    "backward": register_module_full_backward_hook,
    "step-pre": register_optimizer_step_pre_hook,
    "step-post": register_optimizer_step_post_hook,
}


@pytest.mark.parametrize("register", HOOKS.values(), ids=HOOKS.keys())
def test_global_hook_is_seen_until_it_is_removed(
    register: Callable[[Callable[..., None]], torch.utils.hooks.RemovableHandle],
) -> None:
    before = ProcessState.capture()
    handle = register(lambda *_: None)
    (found,) = before.differences(ProcessState.capture())
    assert found.startswith("hook torch.")
    handle.remove()
    assert before.differences(ProcessState.capture()) == []


def test_thread_that_runs_on_is_seen_and_one_that_ends_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("process_state.THREAD_GRACE", 0.01)
    before = ProcessState.capture()
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, name="left-over")
    thread.start()
    (found,) = before.differences(ProcessState.capture())
    assert found.startswith("thread left-over")
    later = ProcessState.capture()
    stop.set()
    thread.join()
    assert before.differences(later) == []


SETTINGS: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
    "torch.get_default_dtype()": (
        lambda: torch.set_default_dtype(torch.float64),
        lambda: torch.set_default_dtype(torch.float32),
    ),
    "torch.is_grad_enabled()": (
        lambda: torch.set_grad_enabled(False),
        lambda: torch.set_grad_enabled(True),
    ),
    "torch.backends.mha.get_fastpath_enabled()": (
        lambda: torch.backends.mha.set_fastpath_enabled(False),
        lambda: torch.backends.mha.set_fastpath_enabled(True),
    ),
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_global_setting_is_seen_until_it_is_set_back(setting: str) -> None:
    move, move_back = SETTINGS[setting]
    before = ProcessState.capture()
    move()
    found = before.differences(ProcessState.capture())
    move_back()
    assert any(line.startswith(f"setting {setting} was ") for line in found)
    assert before.differences(ProcessState.capture()) == []


LEAKY_TESTS = """
    import torch
    import amp_patch as amp

    def test_leaves_a_session():
        amp.initialize(torch.nn.Linear(2, 2), opt_level="O4", verbosity=0)
        assert torch.nn.functional.linear is not PLAIN[0]

    PLAIN = [torch.nn.functional.linear]

    def test_starts_without_that_session():
        assert torch.nn.functional.linear is PLAIN[0]

    def test_leaves_a_patch():
        torch.matmul = torch.mm

    def test_leaves_a_hook():
        torch.nn.modules.module.register_module_forward_hook(lambda *_: None)

    def test_leaves_nothing():
        pass
"""


def test_suite_fails_the_test_that_leaks_and_no_other(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = Path(__file__).parent
    monkeypatch.setenv("PYTHONPATH", str(Path(amp.__file__).parents[1]))
    for name in ("conftest.py", "process_state.py"):
        (pytester.path / name).write_text((here / name).read_text())
    pytester.makepyfile(LEAKY_TESTS)
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", "-p", "no:xdist")
    result.assert_outcomes(passed=5, errors=2)
    result.stdout.fnmatch_lines_random(
        [
            "*ERROR at teardown of test_leaves_a_patch*",
            "*attribute torch.matmul was *",
            "*ERROR at teardown of test_leaves_a_hook*",
            "*hook torch.nn.modules.module._global_forward_hooks*",
        ]
    )
