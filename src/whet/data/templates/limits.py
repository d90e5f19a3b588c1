"""Limits on the work of rendering a chat template. They count steps, not time, so they are deterministic.

A template is code that came with a model. Jinja's sandbox keeps it away from files and Python's internals,
but does not stop it from exhausting memory or looping forever. Steps (loop items, calls, filters, operators,
outputs) and created characters are counted. Operations that could create a large value from a small one are
checked before they run.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

from jinja2 import TemplateError
from jinja2.sandbox import SandboxedEnvironment
from jinja2.utils import Namespace

MAX_TEMPLATE_CHARS = 2**18
BASE_STEPS, STEPS_PER_MESSAGE = 1_000_000, 2_000
CALL_STEPS = 8  # cost of a call, in loop items
BASE_CHARS, MAX_SCALED_CHARS = 2**27, 2**31
_ITEM_CHARS = 64  # cost of a list item: about its size in bytes
_MAX_INTEGER = 2**20  # limit for the bits of created integers, for widths and for counts
_MAX_DATE_FORMAT = 256

_OPERATORS = SandboxedEnvironment.default_binop_table
_DIGITS = re.compile(r"\d+")
_PADDING_METHODS = frozenset(["center", "ljust", "rjust", "zfill", "to_bytes"])
_SPLITTING_METHODS = frozenset(["split", "rsplit", "splitlines"])


class TemplateLimitError(TemplateError):
    """A template exceeds a limit on steps or on the size of created values."""


class Limits:
    """The remaining budget of the current rendering."""

    __slots__ = ("chars", "position", "starts", "steps")

    def __init__(self) -> None:
        self.start(messages=0, size=0)

    def start(self, *, messages: int, size: int) -> None:
        """Start a rendering of `messages` messages with `size` characters in total."""
        self.steps = BASE_STEPS + STEPS_PER_MESSAGE * messages
        self.chars = min(BASE_CHARS + 1024 * size, MAX_SCALED_CHARS) + 64 * size
        self.position = 0  # characters written so far
        self.starts: dict[int, int] = {}  # id of a loop item -> position when it was reached

    def spend(self, chars: int = 0, steps: int = 1) -> None:
        """Charge steps, and the characters they created or read."""
        self.steps -= steps
        self.chars -= chars
        if self.chars < 0:
            raise TemplateLimitError("it creates too much text")
        if self.steps < 0:
            raise TemplateLimitError("it runs too many steps")

    def check(self, chars: int) -> None:
        """Raise an error before a value of this many characters is created."""
        if chars > self.chars:
            raise TemplateLimitError("it creates too much text")

    def count_items(self, items: Iterable[Any]) -> Iterator[Any]:  # Any: values of a template, in this module
        """Yield the items of a loop, and charge one step per item."""
        for item in items:
            self.steps -= 1
            if self.steps < 0:
                raise TemplateLimitError("it runs too many steps")
            if type(item) is dict:
                self.starts[id(item)] = self.position
            yield item

    def printed_size(self, value: Any) -> int:
        """Return the characters of a value when printed; shared parts count each time they occur."""
        if isinstance(value, str | bytes):
            return len(value)
        total, pending = 0, [value]
        while pending:
            value = pending.pop()
            if isinstance(value, str | bytes):
                total += len(value)
            elif isinstance(value, int):
                total += value.bit_length() // 3
            elif (items := _items(value)) is not None:
                total += len(items)
                self.spend(steps=len(items))
                pending.extend(items)
            self.check(total)
        return total

    def charge_read(self, value: Any) -> Any:
        """Charge for a value that is about to be compared, hashed or printed, and return it."""
        if isinstance(value, str):
            self.chars -= len(value)
        elif _items(value) is not None:
            self.spend(self.printed_size(value))
        return value

    def charge_output(self, value: Any) -> str:
        """Return the text of a value that is printed, and charge for it."""
        if type(value) is not str:
            value = str(self.charge_read(value))
        self.steps -= 1
        self.chars -= len(value)
        if self.chars < 0 or self.steps < 0:
            self.spend()
        return value

    def charge_created(self, value: Any) -> Any:
        """Charge for a value that was just created, and return it."""
        self.spend(_cost(value), CALL_STEPS)
        return value


def _items(value: Any) -> Sequence[Any] | None:
    """Return the contents of a container, or None for any other value."""
    if isinstance(value, Namespace):
        value = object.__getattribute__(value, "_Namespace__attrs")
    if isinstance(value, list | tuple):
        return value
    if isinstance(value, Mapping):
        return [*value, *value.values()]
    return list(value) if isinstance(value, AbstractSet | type({}.values())) else None


def _cost(value: Any) -> int:
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, list | tuple | dict):
        return _ITEM_CHARS * len(value)
    return value.bit_length() // 8 if isinstance(value, int) else 0


def operate(limits: Limits, operator: str, left: Any, right: Any) -> Any:
    """Apply an operator, unless its result would be too large."""
    if operator == "+" and type(left) is str and type(right) is str:  # by far the most frequent
        limits.spend(len(left) + len(right))
        return left + right
    _check_operator(limits, operator, left, right)
    return limits.charge_created(_OPERATORS[operator](left, right))


def _check_operator(limits: Limits, operator: str, left: Any, right: Any) -> None:
    if operator == "+":
        limits.check(_cost(left) + _cost(right))
    elif operator == "%" and isinstance(left, str | bytes):
        _check_percent(limits, left if isinstance(left, str) else left.decode("latin-1"), right)
    elif operator == "*":
        if isinstance(left, int) and isinstance(right, int):
            _check_integer(left.bit_length() + right.bit_length())
        elif isinstance(left, int) or isinstance(right, int):
            count, repeated = (left, right) if isinstance(left, int) else (right, left)
            limits.check(max(_cost(repeated), 1) * max(count, 0))
    elif operator == "**" and isinstance(left, int) and isinstance(right, int):
        _check_integer(left.bit_length() * abs(right))


def check_method(limits: Limits, owner: Any, name: str, arguments: Sequence[Any]) -> None:
    """Raise an error for a method of a string or number whose result would be too large."""
    integers = [abs(argument) for argument in arguments if isinstance(argument, int)]
    if name in _PADDING_METHODS:
        _check_integer(max(integers, default=0))
        limits.check(max(integers, default=0))
    elif name == "expandtabs":
        limits.check(len(owner) * max(integers, default=8))
    elif name == "replace" and len(arguments) > 1:
        _check_replace(limits, owner, arguments[0], arguments[1])
    elif name == "join":
        check_join(limits, owner, arguments[0] if arguments else ())
    elif name == "translate":
        limits.check(len(owner) * max(limits.printed_size(list(arguments)), 1))
    elif name in _SPLITTING_METHODS:
        separator = arguments[0] if arguments and isinstance(arguments[0], str | bytes) else None
        pieces = owner.count(separator) if separator else len(owner) // 2
        limits.check(_ITEM_CHARS * pieces)
    elif name in ("format", "format_map"):
        _check_format(limits, owner, arguments)


def check_filter(limits: Limits, name: str, arguments: Sequence[Any], options: Mapping[str, Any]) -> None:
    """Raise an error for a filter whose result would be too large. The filtered value comes first."""
    value, *rest = arguments
    rest += options.values()
    if name == "replace":
        old, new = (*arguments[1:3], options.get("old", ""), options.get("new", ""))[:2]
        if "new" in options:
            new = options["new"]
        _check_replace(limits, str(value), str(old), str(new))
    elif name == "join":
        check_join(
            limits,
            max((argument for argument in rest if isinstance(argument, str)), key=len, default=""),
            value,
        )
    elif name == "format":
        _check_percent(limits, str(value), rest)
    elif name == "indent":
        widths = [argument if isinstance(argument, int) else len(str(argument)) for argument in rest]
        limits.check((str(value).count("\n") + 1) * max(widths, default=4))
    elif name == "list" and hasattr(value, "__len__"):
        limits.check(_ITEM_CHARS * len(value))
    elif name in ("center", "round", "batch", "slice", "truncate"):
        _check_integer(max((abs(argument) for argument in rest if isinstance(argument, int)), default=0))


def check_date_format(text: Any) -> str:
    """Return a date format, if its length is reasonable."""
    text = str(text)
    if len(text) > _MAX_DATE_FORMAT or any(len(digits) > 3 for digits in _DIGITS.findall(text)):
        raise TemplateLimitError("a date format is too long")
    return text


def check_join(limits: Limits, separator: str, items: Any) -> None:
    """Raise an error if joining the items would create too much text."""
    if hasattr(items, "__len__"):
        limits.check(limits.printed_size(items) + len(separator) * len(items))


def _check_replace(limits: Limits, text: str, old: str, new: str) -> None:
    limits.check(len(text) + text.count(old) * len(new))


def _check_percent(limits: Limits, text: str, arguments: Any) -> None:
    arguments = arguments if isinstance(arguments, list | tuple) else [arguments]
    widths = _sum_of_widths(text)
    if "*" in text:
        widths += sum(abs(argument) for argument in arguments if isinstance(argument, int))
    limits.check(len(text) + widths + text.count("%") * limits.printed_size(arguments))


def _check_format(limits: Limits, text: str, arguments: Sequence[Any]) -> None:
    widths = _sum_of_widths(text)
    if re.search(r":[^{}]*\{", text):  # the width is an argument
        widths += sum(abs(argument) for argument in arguments if isinstance(argument, int))
        widths += sum(_sum_of_widths(argument) for argument in arguments if isinstance(argument, str))
    limits.check(len(text) + widths + text.count("{") * limits.printed_size(list(arguments)))


def _sum_of_widths(text: str) -> int:
    """Return the sum of the numbers in a format string, each of which may be a width."""
    return sum(int(digits) if len(digits) < 10 else 10**10 for digits in _DIGITS.findall(text))


def _check_integer(value: int) -> None:
    if value > _MAX_INTEGER:
        raise TemplateLimitError("a number in it is too large")


def limited_filter(limits: Limits, name: str, function: Any, *, has_context: bool) -> Any:  # Any: a function
    """Wrap a filter so that its work is counted and results that are too large are rejected."""
    is_shallow = name in _SHALLOW_FILTERS

    def limited(*arguments: Any, **options: Any) -> Any:
        values = list(arguments)
        first = int(has_context)  # Jinja passes its context to some filters before the value
        if not is_shallow:
            values[first:] = [
                list(value) if isinstance(value, Iterator) else value for value in values[first:]
            ]
            for value in (*values[first:], *options.values()):
                limits.charge_read(value)
        check_filter(limits, name, values[first:], options)
        return limits.charge_created(function(*values, **options))

    # the attributes mark filters that need the Jinja context
    limited.__dict__.update(getattr(function, "__dict__", {}))
    return limited


# filters that do not inspect the items of a container
_SHALLOW_FILTERS = frozenset(
    [
        "length",
        "count",
        "first",
        "last",
        "list",
        "reverse",
        "items",
        "default",
        "d",
        "select",
        "reject",
        "selectattr",
        "rejectattr",
        "map",
        "attr",
    ]
)
