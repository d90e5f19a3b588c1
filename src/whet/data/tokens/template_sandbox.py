"""Chat templates: the Jinja that transformers renders them with, under limits on steps and memory."""

import json
import threading
from collections.abc import Mapping, Sequence
from datetime import date, datetime
from typing import Any, cast

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import make_attrgetter
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from whet.data.tokens import template_limits as limits_of
from whet.data.tokens.template_limits import Limits, TemplateLimitError
from whet.errors import DataError, shorten

_REASONING = ("reasoning_content", "thinking", "reasoning")  # names of a message's reasoning
# filters of web pages, which no chat needs and which take more than linear time
_LEFT_OUT = frozenset(["pprint", "striptags", "urlize", "wordwrap", "xmlattr"])
_KEPT = 64  # compiled templates
_KNOWN = threading.local()
_MAX_INDENT = 100  # of JSON, once per level
_JINJA_ARGUMENTS = frozenset(["_loop_vars", "_block_vars", "caller"])  # that generated code adds to calls
_COMPARING = frozenset(
    [
        "in",
        "==",
        "eq",
        "equalto",
        "!=",
        "ne",
        ">",
        "gt",
        "greaterthan",
        ">=",
        "ge",
        "<",
        "lt",
        "lessthan",
        "<=",
        "le",
        "divisibleby",
    ]
)


class Rendered(str):
    """A rendered conversation that knows where the template began with each message."""

    starts: Sequence[int | None]


def render_template(
    source: str,
    messages: Sequence[Mapping[str, Any]],  # Any: JSON values
    *,
    tools: Any = None,  # Any: JSON values
    prompt: bool = False,
    special: Mapping[str, Any] | None = None,  # Any: the texts of special tokens
    today: date | None = None,
) -> Rendered:
    """Render messages as transformers does, or raise a DataError that says why the template cannot."""
    try:
        return _render(source, messages, tools=tools, prompt=prompt, special=special or {}, today=today)
    except TemplateLimitError as error:
        message = f"the chat template does more than a chat needs: {error}"
        raise DataError(message, hint="use the template of a model that you trust") from error
    except RecursionError as error:
        raise DataError("the chat template is nested too deeply, or calls itself without an end") from error
    except MemoryError as error:
        raise DataError("the chat template needs more memory than there is") from error
    except jinja2.TemplateSyntaxError as error:
        message = f"the chat template is not valid Jinja: line {error.lineno}: {shorten(str(error.message))}"
        raise DataError(message, hint="correct the template, or copy the model's again") from error
    except (
        jinja2.TemplateError,
        ArithmeticError,
        AttributeError,
        LookupError,
        RuntimeError,
        SyntaxError,
        TypeError,
        ValueError,
    ) as error:
        raise DataError(f"the chat template refuses these messages: {shorten(str(error))}") from error


def _render(
    source: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Any,
    prompt: bool,
    special: Mapping[str, Any],
    today: date | None,
) -> Rendered:
    if not messages:
        raise ValueError("there are no messages")
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise ValueError("tools must be a list of objects")
    chat = [_with_reasoning(message) for message in messages]
    template, limits = _compiled(source)
    limits.start(messages=len(chat), size=_json_size([chat, tools]))

    def strftime_now(text: Any) -> str:
        return (today or datetime.now()).strftime(limits_of.check_date_format(text))

    pieces = []
    for piece in template.generate(
        messages=chat,
        tools=tools,
        documents=None,
        add_generation_prompt=prompt,
        strftime_now=strftime_now,
        **special,
    ):
        pieces.append(piece)
        limits.position += len(piece)
    text = Rendered("".join(pieces))
    text.starts = [limits.starts.get(id(message)) for message in chat]
    return text


def _with_reasoning(message: Mapping[str, Any]) -> dict[str, Any]:
    """Copy a message; its reasoning goes under each name that templates look for, as in transformers."""
    if not isinstance(message, Mapping):
        raise TypeError("a message must be an object")
    given = next((message[key] for key in _REASONING if message.get(key) is not None), None)
    if given is None:
        return dict(message)
    return {"thinking": given, **message, "reasoning_content": given}


def _json_size(value: Any) -> int:
    """Characters and values in what a template is given, which must be JSON."""
    total, left = 0, [value]
    while left:
        value = left.pop()
        total += 1
        if isinstance(value, str):
            total += len(value)
        elif isinstance(value, dict):
            left += value
            left += value.values()
        elif isinstance(value, list | tuple):
            left += value
        elif value is not None and not isinstance(value, int | float):
            raise TypeError(f"a {type(value).__name__} is not a JSON value")
    return total


def _compiled(source: str) -> tuple[jinja2.Template, Limits]:
    """A template and what counts its steps: both for this thread alone."""
    known = _KNOWN.__dict__
    if source not in known:
        if len(source) > limits_of.MAX_TEMPLATE_CHARS:
            raise TemplateLimitError(f"it has {len(source):,} characters")
        if len(known) >= _KEPT:
            known.clear()
        limits = Limits()
        known[source] = _Environment(limits).from_string(source), limits
    found: tuple[jinja2.Template, Limits] = known[source]
    return found


class _Environment(ImmutableSandboxedEnvironment):
    """What transformers gives a template, with every step counted."""

    intercepted_binops = frozenset(["+", "-", "*", "/", "//", "**", "%"])

    def __init__(self, limits: Limits) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,  # what is constant would be computed without being counted
            finalize=jinja2.pass_context(lambda _, value: limits.write(value)),
            extensions=[_Generation, loopcontrols],
        )
        self.limits = limits
        del self.globals["lipsum"]
        self.globals |= {"raise_exception": _raise, "dict": _Dict(), "namespace": _Namespace}
        filters: dict[str, Any] = {**self.filters, "tojson": self._to_json, "sum": self._sum}
        self.filters = {
            name: limits_of.limited_filter(limits, name, run, has_context=hasattr(run, "jinja_pass_arg"))
            for name, run in filters.items()
            if name not in _LEFT_OUT
        }
        # names that a template cannot write
        self.filters |= {
            " each": limits.each,
            " read": limits.read,
            " made": limits.made,
            " joined": lambda values: limits.made("".join(str(limits.read(value)) for value in values)),
        }
        for name in _COMPARING:
            self.tests[name] = limits_of.limited_filter(limits, name, self.tests[name], has_context=False)

    def _generate(self, source: nodes.Template, *given: Any, **options: Any) -> str:
        if source.find(nodes.ScopedEvalContextModifier):
            raise jinja2.TemplateError("autoescape is not for chats")
        return super()._generate(_Counting().visit(source), *given, **options)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        return limits_of.operate(self.limits, operator, left, right)

    def getitem(self, obj: Any, argument: Any) -> Any:
        if isinstance(argument, tuple):
            self.limits.read(argument)
        return super().getitem(obj, argument)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return attr not in _LEFT_OUT and super().is_safe_attribute(obj, attr, value)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        """Call what a template calls; the names leave all others to its own arguments."""
        limits = __self.limits
        if isinstance(__obj, Macro | LoopContext) or __obj is _Namespace:
            limits.spend(steps=limits_of.CALL_STEPS)
            return super().call(__context, __obj, *args, **kwargs)
        owner = getattr(getattr(__obj, "__wrapped__", __obj), "__self__", None)
        if isinstance(owner, str | bytes | int):
            args = tuple(list(each) if hasattr(each, "__next__") else each for each in args)
        given = [*args, *(value for name, value in kwargs.items() if name not in _JINJA_ARGUMENTS)]
        for value in given:
            limits.read(value)
        if isinstance(owner, str | bytes | int):
            limits_of.check_method(limits, owner, __obj.__name__, given)
        return limits.made(super().call(__context, __obj, *args, **kwargs))

    def _to_json(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        encoder = json.JSONEncoder(
            ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )
        if indent is None and separators is None:
            return encoder.encode(value)
        if isinstance(indent, int) and indent > _MAX_INDENT:
            raise TemplateLimitError("an indent is too wide")
        pieces = []
        for piece in encoder.iterencode(value):
            self.limits.spend(len(piece))
            pieces.append(piece)
        return "".join(pieces)

    @staticmethod
    @jinja2.pass_environment
    def _sum(
        environment: "_Environment", iterable: Any, attribute: str | int | None = None, start: Any = 0
    ) -> Any:
        if isinstance(start, str):
            raise TypeError("texts are joined, not summed")
        if attribute is not None:
            iterable = map(make_attrgetter(environment, attribute), iterable)
        for value in iterable:
            start = limits_of.operate(environment.limits, "+", start, value)
        return start


class _Counting(NodeTransformer):
    """Passes what a template loops over, compares, slices, joins and writes through the limits."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.iter = _filtered(cast("nodes.Expr", node.iter), " each")
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.expr = _read(node.expr)  # no comparison takes longer than its smaller side
        for operand in node.ops[:-1]:
            operand.expr = _read(operand.expr)
        return node

    def visit_Pair(self, node: nodes.Pair) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.key = _read(node.key)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _filtered(nodes.List(node.nodes, lineno=node.lineno), " joined")

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _filtered(node, " made") if isinstance(node.arg, nodes.Slice) else node

    def visit_TemplateData(self, node: nodes.TemplateData) -> nodes.Node:  # noqa: N802
        return nodes.Const(node.data, lineno=node.lineno)  # which is written as a value, and so counted


def _filtered(node: nodes.Expr, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _read(node: nodes.Expr) -> nodes.Expr:
    items = node.items if isinstance(node, nodes.List | nodes.Tuple) else [node]
    return node if all(isinstance(item, nodes.Const) for item in items) else _filtered(node, " read")


class _Generation(Extension):
    """`{% generation %}`, with which templates mark what an assistant says."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_said"), [], [], body).set_lineno(line)

    def _said(self, caller: Macro) -> str:
        return caller()


class _Dict:
    """`dict`, of which a template can have no attributes but these."""

    def __call__(self, *given: Any, **fields: Any) -> dict[Any, Any]:
        return dict(*given, **fields)

    def fromkeys(self, *given: Any) -> dict[Any, Any]:
        return dict.fromkeys(*given)


class _Namespace(Namespace):
    """`namespace`, without names of Python's internals."""

    def __init__(*given: Any, **fields: Any) -> None:
        self, *others = given
        for name in (values := dict(*others, **fields)):
            _Namespace._check(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _Namespace._check(name)
        Namespace.__setitem__(self, name, value)

    @staticmethod
    def _check(name: str) -> None:
        if str(name).startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a namespace cannot hold {name!r}")


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)
