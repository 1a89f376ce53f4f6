"""Whether the code that runs is traced: what is kept of one call must then not serve another."""

from __future__ import annotations

import torch

_KEYS = torch._C._TorchDispatchModeKey
_TRACING_MODES = (_KEYS.FAKE, _KEYS.PROXY, _KEYS.FUNCTIONAL)  # fake tensors, make_fx, export

# Asked at every call that has a weight. `is_compiling` costs twice as much, and is true besides
# only in exports, which have modes.
_is_compiling = torch.compiler.is_dynamo_compiling
_functorch_stack = torch._C._functorch.peek_interpreter_stack
is_tracing_to_script = torch._C._is_tracing  # as torch.jit.trace does
dispatch_modes = torch._C._len_torch_dispatch_stack


def is_tracing() -> bool:
    """Whether a cast that is made now must not be kept, and a kept one would become a constant."""
    if _is_compiling() or is_tracing_to_script() or _functorch_stack():
        return True
    return dispatch_modes() > 0 and any(map(torch._C._get_dispatch_mode, _TRACING_MODES))
