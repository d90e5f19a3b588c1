"""Limits on what one rendering of a chat template may do; counted, not timed, so the outcome never varies.

A template is code that came with a model. Jinja's sandbox keeps it from files and from Python's internals,
not from filling memory or looping for ever. Steps (loop items, calls, filters, operators, outputs) and
characters made are counted; whatever could make much out of little is refused before it is made.
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
CALL_STEPS = 8  # what a call takes, in loop items
BASE_CHARS, MAX_SCALED_CHARS = 2**27, 2**31
_ITEM_CHARS = 64  # what an item of a list counts as: about its bytes
_MAX_NUMBER = 2**20  # bits of an integer that is made, widths, counts
_MAX_DATE_FORMAT = 256

_OPERATORS = SandboxedEnvironment.default_binop_table
_NUMBERS = re.compile(r"\d+")
_PADDING = frozenset(["center", "ljust", "rjust", "zfill", "to_bytes"])
_SPLITTING = frozenset(["split", "rsplit", "splitlines"])


class TemplateLimitError(TemplateError):
    """A template does more work, or makes a larger value, than a chat needs."""


class Limits:
    """What the rendering under way may still do."""

    __slots__ = ("chars", "position", "starts", "steps")

    def __init__(self) -> None:
        self.start(messages=0, size=0)

    def start(self, *, messages: int, size: int) -> None:
        """Begin a rendering of so many messages that hold so many characters."""
        self.steps = BASE_STEPS + STEPS_PER_MESSAGE * messages
        self.chars = min(BASE_CHARS + 1024 * size, MAX_SCALED_CHARS) + 64 * size
        self.position = 0  # characters written so far
        self.starts: dict[int, int] = {}  # by id of a mapping that was looped over: how many there were then

    def spend(self, chars: int = 0, steps: int = 1) -> None:
        """Count steps that made or read so many characters."""
        self.steps -= steps
        self.chars -= chars
        if self.chars < 0:
            raise TemplateLimitError("it makes too much text")
        if self.steps < 0:
            raise TemplateLimitError("it runs too many steps")

    def check(self, chars: int) -> None:
        """Refuse a value of so many characters before it is made."""
        if chars > self.chars:
            raise TemplateLimitError("it makes too much text")

    def each(self, items: Iterable[Any]) -> Iterator[Any]:  # Any: values of a template, here and below
        """The items of a loop, a step each."""
        for item in items:
            self.steps -= 1
            if self.steps < 0:
                raise TemplateLimitError("it runs too many steps")
            if type(item) is dict:
                self.starts[id(item)] = self.position
            yield item

    def expanded(self, value: Any) -> int:
        """Characters of a value written out, where what occurs several times is written several times."""
        if isinstance(value, str | bytes):
            return len(value)
        total, left = 0, [value]
        while left:
            value = left.pop()
            if isinstance(value, str | bytes):
                total += len(value)
            elif isinstance(value, int):
                total += value.bit_length() // 3
            elif (items := _items(value)) is not None:
                total += len(items)
                self.spend(steps=len(items))
                left.extend(items)
            self.check(total)
        return total

    def read(self, value: Any) -> Any:
        """A value that is about to be compared, hashed or written out whole."""
        if isinstance(value, str):
            self.chars -= len(value)
        elif _items(value) is not None:
            self.spend(self.expanded(value))
        return value

    def write(self, value: Any) -> str:
        """A value as the text that is written for it."""
        if type(value) is not str:
            value = str(self.read(value))
        self.steps -= 1
        self.chars -= len(value)
        if self.chars < 0 or self.steps < 0:
            self.spend()
        return value

    def made(self, value: Any) -> Any:
        """A value that was made."""
        self.spend(_size(value), CALL_STEPS)
        return value


def _items(value: Any) -> Sequence[Any] | None:
    """What a container holds; None of anything else."""
    if isinstance(value, Namespace):
        value = object.__getattribute__(value, "_Namespace__attrs")
    if isinstance(value, list | tuple):
        return value
    if isinstance(value, Mapping):
        return [*value, *value.values()]
    return list(value) if isinstance(value, AbstractSet | type({}.values())) else None


def _size(value: Any) -> int:
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
    return limits.made(_OPERATORS[operator](left, right))


def _check_operator(limits: Limits, operator: str, left: Any, right: Any) -> None:
    if operator == "+":
        limits.check(_size(left) + _size(right))
    elif operator == "%" and isinstance(left, str | bytes):
        _check_percent(limits, left if isinstance(left, str) else left.decode("latin-1"), right)
    elif operator == "*":
        if isinstance(left, int) and isinstance(right, int):
            _check_number(left.bit_length() + right.bit_length())
        elif isinstance(left, int) or isinstance(right, int):
            count, repeated = (left, right) if isinstance(left, int) else (right, left)
            limits.check(max(_size(repeated), 1) * max(count, 0))
    elif operator == "**" and isinstance(left, int) and isinstance(right, int):
        _check_number(left.bit_length() * abs(right))


def check_method(limits: Limits, owner: Any, name: str, arguments: Sequence[Any]) -> None:
    """Refuse a method of a text or number whose result would be too large."""
    numbers = [abs(argument) for argument in arguments if isinstance(argument, int)]
    if name in _PADDING:
        _check_number(max(numbers, default=0))
        limits.check(max(numbers, default=0))
    elif name == "expandtabs":
        limits.check(len(owner) * max(numbers, default=8))
    elif name == "replace" and len(arguments) > 1:
        _check_replace(limits, owner, arguments[0], arguments[1])
    elif name == "join":
        check_join(limits, owner, arguments[0] if arguments else ())
    elif name == "translate":
        limits.check(len(owner) * max(limits.expanded(list(arguments)), 1))
    elif name in _SPLITTING:
        separator = arguments[0] if arguments and isinstance(arguments[0], str | bytes) else None
        pieces = owner.count(separator) if separator else len(owner) // 2
        limits.check(_ITEM_CHARS * pieces)
    elif name in ("format", "format_map"):
        _check_format(limits, owner, arguments)


def check_filter(limits: Limits, name: str, arguments: Sequence[Any], options: Mapping[str, Any]) -> None:
    """Refuse a filter whose result would be too large; its value comes first."""
    value, *others = arguments
    others += options.values()
    if name == "replace":
        old, new = (*arguments[1:3], options.get("old", ""), options.get("new", ""))[:2]
        if "new" in options:
            new = options["new"]
        _check_replace(limits, str(value), str(old), str(new))
    elif name == "join":
        check_join(
            limits, max((each for each in others if isinstance(each, str)), key=len, default=""), value
        )
    elif name == "format":
        _check_percent(limits, str(value), others)
    elif name == "indent":
        widths = [each if isinstance(each, int) else len(str(each)) for each in others]
        limits.check((str(value).count("\n") + 1) * max(widths, default=4))
    elif name == "list" and hasattr(value, "__len__"):
        limits.check(_ITEM_CHARS * len(value))
    elif name in ("center", "round", "batch", "slice", "truncate"):
        _check_number(max((abs(each) for each in others if isinstance(each, int)), default=0))


def check_date_format(text: Any) -> str:
    """The format of a date, if it is one that a template would use."""
    text = str(text)
    if len(text) > _MAX_DATE_FORMAT or any(len(number) > 3 for number in _NUMBERS.findall(text)):
        raise TemplateLimitError("the format of a date is too long")
    return text


def check_join(limits: Limits, separator: str, items: Any) -> None:
    """Refuse to join so many, or such long, items."""
    if hasattr(items, "__len__"):
        limits.check(limits.expanded(items) + len(separator) * len(items))


def _check_replace(limits: Limits, text: str, old: str, new: str) -> None:
    limits.check(len(text) + text.count(old) * len(new))


def _check_percent(limits: Limits, text: str, arguments: Any) -> None:
    arguments = arguments if isinstance(arguments, list | tuple) else [arguments]
    widths = _numbers_in(text)
    if "*" in text:
        widths += sum(abs(each) for each in arguments if isinstance(each, int))
    limits.check(len(text) + widths + text.count("%") * limits.expanded(arguments))


def _check_format(limits: Limits, text: str, arguments: Sequence[Any]) -> None:
    widths = _numbers_in(text)
    if re.search(r":[^{}]*\{", text):  # a width among the arguments
        widths += sum(abs(each) for each in arguments if isinstance(each, int))
        widths += sum(_numbers_in(each) for each in arguments if isinstance(each, str))
    limits.check(len(text) + widths + text.count("{") * limits.expanded(list(arguments)))


def _numbers_in(text: str) -> int:
    """The sum of the numbers in a format, each of which may be a width."""
    return sum(int(number) if len(number) < 10 else 10**10 for number in _NUMBERS.findall(text))


def _check_number(number: int) -> None:
    if number > _MAX_NUMBER:
        raise TemplateLimitError("a number in it is too large")


def limited_filter(limits: Limits, name: str, run: Any, *, has_context: bool) -> Any:  # Any: a function
    """A filter that counts, and refuses what would be too large."""
    shallow = name in _SHALLOW

    def limited(*arguments: Any, **options: Any) -> Any:
        given = list(arguments)
        first = int(has_context)  # Jinja passes some filters its own state before the value
        if not shallow:
            given[first:] = [list(each) if isinstance(each, Iterator) else each for each in given[first:]]
            for each in (*given[first:], *options.values()):
                limits.read(each)
        check_filter(limits, name, given[first:], options)
        return limits.made(run(*given, **options))

    limited.__dict__.update(getattr(run, "__dict__", {}))  # whether it wants Jinja's state
    return limited


# filters that look at a container and not into what it holds
_SHALLOW = frozenset(
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
