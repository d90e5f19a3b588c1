"""Functions that a compiler sees as one operation."""

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

_Given = ParamSpec("_Given")
_Found = TypeVar("_Found")
_LIBRARY = torch.library.Library("whet", "FRAGMENT")


def operation(
    fake: Callable[..., Any],  # Any: tensors with the shapes of what the function returns
) -> Callable[[Callable[_Given, _Found]], Callable[_Given, _Found]]:
    """A function that compiled code calls instead of looking into it; `fake` gives the shapes of its results.

    (By a library, since a call of a `custom_op` takes three times as long, and a layer has eleven of them.)
    """

    def decorate(function: Callable[_Given, _Found]) -> Callable[_Given, _Found]:
        name = function.__name__
        _LIBRARY.define(name + torch.library.infer_schema(function, mutates_args=()))
        _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
        torch.library.register_fake(f"whet::{name}", fake, lib=_LIBRARY)
        compiled = getattr(torch.ops.whet, name).default

        @functools.wraps(function)
        def run(*given: _Given.args, **named: _Given.kwargs) -> _Found:
            found: _Found = (compiled if torch.compiler.is_compiling() else function)(*given, **named)
            return found

        return run

    return decorate
