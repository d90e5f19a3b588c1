"""Render chat templates with the Jinja environment of transformers, limited in steps and memory."""

import contextlib
import json
import threading
from collections.abc import Iterator, Mapping, Sequence
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

from whet.data.templates import limits as template_limits
from whet.data.templates.limits import Limits, TemplateLimitError
from whet.errors import DataError, shorten

# keys under which a message may store its reasoning
_REASONING = ("reasoning_content", "thinking", "reasoning")
# HTML filters, which chats do not need and whose time is more than linear
_DISABLED_FILTERS = frozenset(["pprint", "striptags", "urlize", "wordwrap", "xmlattr"])
_MAX_CACHED = 64  # compiled templates per thread
_CACHE = threading.local()
_MAX_INDENT = 100  # of JSON; repeated for each level
_JINJA_ARGUMENTS = frozenset(["_loop_vars", "_block_vars", "caller"])  # added to calls by compiled templates
_COMPARISON_TESTS = frozenset(
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
    """A rendered conversation with the position at which the template reached each message."""

    starts: Sequence[int | None]


def render_template(
    source: str,
    messages: Sequence[Mapping[str, Any]],  # Any: JSON values
    *,
    tools: Any = None,  # Any: JSON values
    prompt: bool = False,
    special: Mapping[str, Any] | None = None,  # Any: the texts of special tokens
    today: date | None = None,
    arguments: Mapping[str, Any] | None = None,  # Any: JSON values
) -> Rendered:
    """Render messages as transformers does. Raises a DataError with the reason if the template fails."""
    with _template_errors():
        values = {"documents": None, **(special or {}), **(arguments or {})}
        size = _json_size(arguments)
        return _render(
            source, messages, tools=tools, prompt=prompt, values=values, today=today, argument_size=size
        )


def parse_template(source: str) -> nodes.Template:
    """Return the syntax tree of a template. Raises a DataError if it is not valid."""
    with _template_errors():
        if len(source) > template_limits.MAX_TEMPLATE_CHARS:
            raise TemplateLimitError(f"it has {len(source):,} characters")
        return _Environment(Limits()).parse(source)


@contextlib.contextmanager
def _template_errors() -> Iterator[None]:
    """Convert the errors of Jinja to DataErrors."""
    try:
        yield
    except TemplateLimitError as error:
        message = f"the chat template exceeds a limit of whet: {error}"
        raise DataError(message, hint="use the chat template of a model that you trust") from error
    except RecursionError as error:
        raise DataError("the chat template is nested too deeply, or recurses without end") from error
    except MemoryError as error:
        raise DataError("the chat template needs more memory than is available") from error
    except jinja2.TemplateSyntaxError as error:
        message = f"the chat template is not valid Jinja: line {error.lineno}: {shorten(str(error.message))}"
        raise DataError(message, hint="fix the template, or download the model again") from error
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
        raise DataError(f"the chat template rejects these messages: {shorten(str(error))}") from error


def _render(
    source: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Any,
    prompt: bool,
    values: Mapping[str, Any],
    today: date | None,
    argument_size: int,
) -> Rendered:
    if not messages:
        raise ValueError("there are no messages")
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise ValueError("tools must be a list of objects")
    chat = [_with_reasoning(message) for message in messages]
    template, limits = _compiled(source)
    limits.start(messages=len(chat), size=_json_size([chat, tools]) + argument_size)

    def strftime_now(text: Any) -> str:
        return (today or datetime.now()).strftime(template_limits.check_date_format(text))

    pieces = []
    for piece in template.generate(
        messages=chat,
        tools=tools,
        add_generation_prompt=prompt,
        strftime_now=strftime_now,
        **values,
    ):
        pieces.append(piece)
        limits.position += len(piece)
    text = Rendered("".join(pieces))
    text.starts = [limits.starts.get(id(message)) for message in chat]
    return text


def _with_reasoning(message: Mapping[str, Any]) -> dict[str, Any]:
    """Copy a message, with its reasoning under every key that templates read, as in transformers."""
    if not isinstance(message, Mapping):
        raise TypeError("a message must be an object")
    reasoning = next((message[key] for key in _REASONING if message.get(key) is not None), None)
    if reasoning is None:
        return dict(message)
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _json_size(value: Any) -> int:
    """Return the number of characters and values in the input of a template, which must be JSON."""
    total, pending = 0, [value]
    while pending:
        value = pending.pop()
        total += 1
        if isinstance(value, str):
            total += len(value)
        elif isinstance(value, dict):
            pending += value
            pending += value.values()
        elif isinstance(value, list | tuple):
            pending += value
        elif value is not None and not isinstance(value, int | float):
            raise TypeError(f"a {type(value).__name__} is not a JSON value")
    return total


def _compiled(source: str) -> tuple[jinja2.Template, Limits]:
    """Return a compiled template and the limits that count its steps. Both belong to this thread."""
    cache = _CACHE.__dict__
    if source not in cache:
        if len(source) > template_limits.MAX_TEMPLATE_CHARS:
            raise TemplateLimitError(f"it has {len(source):,} characters")
        if len(cache) >= _MAX_CACHED:
            cache.clear()
        limits = Limits()
        cache[source] = _Environment(limits).from_string(source), limits
    entry: tuple[jinja2.Template, Limits] = cache[source]
    return entry


class _Environment(ImmutableSandboxedEnvironment):
    """The Jinja environment of transformers, with every step counted."""

    intercepted_binops = frozenset(["+", "-", "*", "/", "//", "**", "%"])

    def __init__(self, limits: Limits) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,  # constant folding would bypass the limits
            finalize=jinja2.pass_context(lambda _, value: limits.charge_output(value)),
            extensions=[_GenerationTag, loopcontrols],
        )
        self.limits = limits
        del self.globals["lipsum"]
        self.globals |= {"raise_exception": _raise, "dict": _SafeDict(), "namespace": _SafeNamespace}
        filters: dict[str, Any] = {**self.filters, "tojson": self._to_json, "sum": self._sum}
        self.filters = {
            name: template_limits.limited_filter(
                limits, name, run, has_context=hasattr(run, "jinja_pass_arg")
            )
            for name, run in filters.items()
            if name not in _DISABLED_FILTERS
        }
        # the leading space keeps templates from using these names
        self.filters |= {
            " each": limits.count_items,
            " read": limits.charge_read,
            " made": limits.charge_created,
            " joined": lambda values: limits.charge_created(
                "".join(str(limits.charge_read(value)) for value in values)
            ),
        }
        for name in _COMPARISON_TESTS:
            self.tests[name] = template_limits.limited_filter(
                limits, name, self.tests[name], has_context=False
            )

    def _generate(self, source: nodes.Template, *args: Any, **options: Any) -> str:
        if source.find(nodes.ScopedEvalContextModifier):
            raise jinja2.TemplateError("autoescape is not supported in chat templates")
        return super()._generate(_CountingTransformer().visit(source), *args, **options)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        return template_limits.operate(self.limits, operator, left, right)

    def getitem(self, obj: Any, argument: Any) -> Any:
        if isinstance(argument, tuple):
            self.limits.charge_read(argument)
        return super().getitem(obj, argument)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return attr not in _DISABLED_FILTERS and super().is_safe_attribute(obj, attr, value)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        """Call a function for a template. The parameter names cannot collide with its keyword arguments."""
        limits = __self.limits
        if isinstance(__obj, Macro | LoopContext) or __obj is _SafeNamespace:
            limits.spend(steps=template_limits.CALL_STEPS)
            return super().call(__context, __obj, *args, **kwargs)
        owner = getattr(getattr(__obj, "__wrapped__", __obj), "__self__", None)
        if isinstance(owner, str | bytes | int):
            args = tuple(list(argument) if hasattr(argument, "__next__") else argument for argument in args)
        values = [*args, *(value for name, value in kwargs.items() if name not in _JINJA_ARGUMENTS)]
        for value in values:
            limits.charge_read(value)
        if isinstance(owner, str | bytes | int):
            template_limits.check_method(limits, owner, __obj.__name__, values)
        return limits.charge_created(super().call(__context, __obj, *args, **kwargs))

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
            raise TypeError("sum does not support strings: use join")
        if attribute is not None:
            iterable = map(make_attrgetter(environment, attribute), iterable)
        for value in iterable:
            start = template_limits.operate(environment.limits, "+", start, value)
        return start


class _CountingTransformer(NodeTransformer):
    """Route everything that a template loops over, compares, slices, joins or prints through the limits."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.iter = _apply_filter(cast("nodes.Expr", node.iter), " each")
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.expr = _charge_read_of(node.expr)  # the cost of a comparison is bounded by the smaller operand
        for operand in node.ops[:-1]:
            operand.expr = _charge_read_of(operand.expr)
        return node

    def visit_Pair(self, node: nodes.Pair) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.key = _charge_read_of(node.key)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _apply_filter(nodes.List(node.nodes, lineno=node.lineno), " joined")

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _apply_filter(node, " made") if isinstance(node.arg, nodes.Slice) else node

    def visit_TemplateData(self, node: nodes.TemplateData) -> nodes.Node:  # noqa: N802
        return nodes.Const(node.data, lineno=node.lineno)  # printed as a value, and therefore counted


def _apply_filter(node: nodes.Expr, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _charge_read_of(node: nodes.Expr) -> nodes.Expr:
    items = node.items if isinstance(node, nodes.List | nodes.Tuple) else [node]
    return node if all(isinstance(item, nodes.Const) for item in items) else _apply_filter(node, " read")


class _GenerationTag(Extension):
    """The `{% generation %}` tag, with which templates mark the text of the assistant."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_render_body"), [], [], body).set_lineno(line)

    def _render_body(self, caller: Macro) -> str:
        return caller()


class _SafeDict:
    """The `dict` of templates, which exposes only these attributes."""

    def __call__(self, *args: Any, **fields: Any) -> dict[Any, Any]:
        return dict(*args, **fields)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _SafeNamespace(Namespace):
    """The `namespace` of templates, which rejects names of Python internals."""

    def __init__(*args: Any, **fields: Any) -> None:
        self, *rest = args
        for name in (values := dict(*rest, **fields)):
            _SafeNamespace._check(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _SafeNamespace._check(name)
        Namespace.__setitem__(self, name, value)

    @staticmethod
    def _check(name: str) -> None:
        if str(name).startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a namespace cannot have the attribute {name!r}")


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)
