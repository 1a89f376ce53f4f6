"""The public functions about casts: the user's own functions, references, and the cast cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

from amp_patch.casts import holders
from amp_patch.casts.context import CastContext
from amp_patch.casts.rules import CastRule
from amp_patch.casts.user_functions import casting_decorator, user_rules
from amp_patch.slot import slot

Function = TypeVar("Function", bound=Callable[..., Any])


def half_function(function: Function) -> Function:
    """Decorator: where casts are active, the function gets its tensors in the half dtype.

    Float16, bfloat16 and float32 tensors in the arguments are cast, also in nested lists, tuples,
    dicts and dataclasses; others, float64 too, stay. For functions, methods, static and class
    methods, and the `forward` of a `torch.autograd.Function`. May be applied before `initialize`.

        >>> import torch
        >>> import amp_patch as amp
        >>> @amp.half_function
        ... def scores(pair):
        ...     return pair["query"] * pair["key"]
        >>> model = amp.initialize(torch.nn.Linear(4, 2), opt_level="O1", verbosity=0)
        >>> scores({"query": torch.ones(3), "key": torch.ones(3)}).dtype
        torch.float16
        >>> amp.uninitialize()
    """
    decorated: Function = _half(function)
    return decorated


def float_function(function: Function) -> Function:
    """Decorator: where casts are active, the function gets its tensors in FP32 and runs in FP32.

    As `half_function`. Operations inside are not cast either. The way to call an
    `autograd.Function` that wants FP32: decorate a function that calls its `apply`, or `forward`.

        >>> import torch
        >>> import amp_patch as amp
        >>> @amp.float_function
        ... def gram(x):
        ...     return x @ x.T
        >>> model = amp.initialize(torch.nn.Linear(4, 2), opt_level="O1", verbosity=0)
        >>> gram(model(torch.ones(3, 4))).dtype
        torch.float32
        >>> amp.uninitialize()
    """
    decorated: Function = _float(function)
    return decorated


def promote_function(function: Function) -> Function:
    """Decorator: where casts are active, the function gets its tensors in their widest dtype.

    As `half_function`.

        >>> import torch
        >>> import amp_patch as amp
        >>> @amp.promote_function
        ... def dtypes(*tensors):
        ...     return [tensor.dtype for tensor in tensors]
        >>> model = amp.initialize(torch.nn.Linear(4, 2), opt_level="O1", verbosity=0)
        >>> dtypes(torch.ones(1), torch.ones(1).half())
        [torch.float32, torch.float32]
        >>> amp.uninitialize()
    """
    decorated: Function = _promote(function)
    return decorated


def register_half_function(module: Any, name: str) -> None:
    """Cast the arguments of `module.name` as `half_function` does, without touching its source.

    `module` is a module, a class or a namespace as `torch.ops.mylibrary`. Before or after
    `initialize`; effective at once, and also under the names that other modules have imported it.
    Outlives `uninitialize`, which takes the casts out; `unregister_function` forgets it. The last
    registration of a name wins, with a warning if it contradicts an earlier one. Goes before the
    rule that an operation of torch has by itself, in this one spelling.

    Raises AmpError if there is no such function.

        >>> import torch
        >>> import amp_patch as amp
        >>> amp.register_half_function(torch, "tanh")
        >>> model = amp.initialize(torch.nn.Linear(4, 2), opt_level="O1", verbosity=0)
        >>> torch.tanh(torch.ones(3)).dtype
        torch.float16
        >>> amp.unregister_function(torch, "tanh")
        >>> amp.uninitialize()
    """
    _register(module, name, CastRule.HALF)


def register_float_function(module: Any, name: str) -> None:
    """Cast the arguments of `module.name` as `float_function` does. See `register_half_function`.

    >>> import torch
    >>> import amp_patch as amp
    >>> amp.register_float_function(torch, "sigmoid")
    >>> model = amp.initialize(torch.nn.Linear(4, 2), opt_level="O1", verbosity=0)
    >>> torch.sigmoid(model(torch.ones(3, 4))).dtype
    torch.float32
    >>> amp.unregister_function(torch, "sigmoid")
    >>> amp.uninitialize()
    """
    _register(module, name, CastRule.FLOAT)


def register_promote_function(module: Any, name: str) -> None:
    """Cast the arguments of `module.name` as `promote_function` does. See `register_half_function`.

    >>> import torch
    >>> import amp_patch as amp
    >>> amp.register_promote_function(torch, "complex")
    >>> model = amp.initialize(torch.nn.Linear(4, 2), opt_level="O1", verbosity=0)
    >>> torch.complex(torch.ones(1), torch.ones(1).half()).dtype
    torch.complex64
    >>> amp.unregister_function(torch, "complex")
    >>> amp.uninitialize()
    """
    _register(module, name, CastRule.PROMOTE)


def unregister_function(module: Any, name: str) -> None:
    """Forget a registration: `module.name` is cast again as it was without it, at once.

    Raises AmpError if there is none.

        >>> import torch
        >>> import amp_patch as amp
        >>> amp.register_half_function(torch, "tanh")
        >>> amp.unregister_function(torch, "tanh")
    """
    user_rules.forget(module, name)
    _renew()


def keep_casts() -> AbstractContextManager[None]:
    """Inside, the user promises not to write weights; without gradients each is cast once in all.

    For inference over many batches: otherwise each forward without gradients casts the weights once
    more, since a write through an alias of `.data` cannot be seen. The cache is empty at the end.
    Does nothing where no casts are active.

        >>> import torch
        >>> import amp_patch as amp
        >>> model = amp.initialize(torch.nn.Linear(4, 2), opt_level="O1", verbosity=0)
        >>> with torch.no_grad(), amp.keep_casts():
        ...     results = [model(batch) for batch in torch.ones(5, 3, 4)]
        >>> amp.uninitialize()
    """
    session = slot.session
    return nullcontext() if session is None else session.context.keeping()


@contextmanager
def verify_casts() -> Iterator[None]:
    """Inside, each use of a cached cast casts the weight again and compares: slow, to find a fault.

    Raises AmpError where the two differ: the weight was written to in a way that torch does not
    count, and `clear_cache` is missing there. Synchronises with the device at each such use.

        >>> import torch
        >>> import amp_patch as amp
        >>> model = amp.initialize(torch.nn.Linear(4, 2), opt_level="O1", verbosity=0)
        >>> with amp.verify_casts():
        ...     _ = model(torch.ones(3, 4)), model(torch.ones(3, 4))
        >>> amp.uninitialize()
    """
    session = slot.session
    if session is None:
        yield
        return
    cache = session.context.cache
    before, cache.verifies = cache.verifies, True
    try:
        yield
    finally:
        cache.verifies = before


def stored_references() -> list[holders.StoredReference]:
    """Functions that objects took from torch before `initialize`, and that are so never cast.

    `initialize` rebinds names in modules of Python and attributes in the models it is given. Not
    these: attributes of other objects and of classes, entries of containers of any kind, defaults,
    closures, variables of running functions. Take them anew after `initialize`, or call the
    function by its name. Walks all objects of the process: slow. Empty where no casts are active.

        >>> import torch
        >>> import amp_patch as amp
        >>> model = torch.nn.Linear(4, 2)
        >>> model.last = [torch.softmax]
        >>> model = amp.initialize(model, opt_level="O1", verbosity=0)
        >>> [str(one) for one in amp.stored_references() if one.place.startswith("Linear")]
        ['torch.softmax in Linear object, attribute last']
        >>> amp.uninitialize()
    """
    session = slot.session
    return [] if session is None else holders.stored_references(session.casts.wrappers)


def _find_context() -> CastContext | None:
    return None if slot.session is None else slot.session.context


_half = casting_decorator(CastRule.HALF, _find_context)
_float = casting_decorator(CastRule.FLOAT, _find_context)
_promote = casting_decorator(CastRule.PROMOTE, _find_context)


def _register(module: Any, name: str, rule: CastRule) -> None:
    user_rules.register(module, name, rule)
    _renew()


def _renew() -> None:
    if slot.session is not None:
        slot.session.renew_casts()
