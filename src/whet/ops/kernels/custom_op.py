"""Registration of functions as operations that torch.compile does not trace into."""

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

_Params = ParamSpec("_Params")
_Result = TypeVar("_Result")
_LIBRARY = torch.library.Library("whet", "FRAGMENT")


def register_operation(
    fake: Callable[..., Any],  # Any: tensors with the shapes of the results
) -> Callable[[Callable[_Params, _Result]], Callable[_Params, _Result]]:
    """Decorate a function so that compiled code calls it as one opaque operation.

    `fake` takes the same arguments and returns empty tensors with the shapes of the results. The function is
    registered through a `torch.library.Library`, because a `custom_op` call takes three times as long and a
    layer has eleven of them.
    """

    def decorate(function: Callable[_Params, _Result]) -> Callable[_Params, _Result]:
        name = function.__name__
        _LIBRARY.define(name + torch.library.infer_schema(function, mutates_args=()))
        _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
        torch.library.register_fake(f"whet::{name}", fake, lib=_LIBRARY)
        compiled = getattr(torch.ops.whet, name).default

        @functools.wraps(function)
        def call(*args: _Params.args, **kwargs: _Params.kwargs) -> _Result:
            result: _Result = (compiled if torch.compiler.is_compiling() else function)(*args, **kwargs)
            return result

        return call

    return decorate
