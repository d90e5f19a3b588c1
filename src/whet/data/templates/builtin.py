"""Chat templates for models that have none, or whose template leaves out tools; and templates from files."""

from pathlib import Path

from whet.data.templates.sandbox import parse_template
from whet.errors import DataError

_CALLS = """{%- macro write_calls(calls) -%}
{%- for call in calls -%}
{%- set function = call.function if call.function else call -%}
{%- set parts = {'name': function.name, 'arguments': function.arguments} -%}
{{- '\\n<tool_call>\\n' + parts | tojson + '\\n</tool_call>' -}}
{%- endfor -%}
{%- endmacro -%}
"""

_TOOLS = """{%- macro write_tools() -%}
{{- 'You may call these tools:\\n<tools>' -}}
{%- for tool in tools -%}{{- '\\n' + tool | tojson -}}{%- endfor -%}
{{- '\\n</tools>\\nTo call one, write <tool_call>{"name": NAME, "arguments": OBJECT}</tool_call>.' -}}
{%- endmacro -%}
"""

_CHATML = (
    _CALLS
    + _TOOLS
    + """{%- set has_system = messages[0].role == 'system' -%}
{%- if tools or has_system -%}
{{- '<|im_start|>system\\n' + (messages[0].content if has_system else '') -}}
{{- ('\\n\\n' if has_system else '') + write_tools() if tools else '' -}}
{{- '<|im_end|>\\n' -}}
{%- endif -%}
LAST_USER{%- for message in (messages[1:] if has_system else messages) -%}
{{- '<|im_start|>' + message.role + '\\n' -}}
THINKING{{- message.content or '' -}}
{{- write_calls(message.tool_calls) if message.tool_calls else '' -}}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}NO_THINKING{%- endif -%}
"""
)

_LAST_USER = """{%- set ns = namespace(last=-1) -%}
{%- for message in messages -%}
{%- if message.role == 'user' -%}{%- set ns.last = loop.index0 - (1 if has_system else 0) -%}{%- endif -%}
{%- endfor -%}
"""

# only the thinking after the last user message is written, as when the model is asked
_THINKING = """{%- set thoughts = message.reasoning_content or '' -%}
{%- set content = message.content or '' -%}
{%- if message.role == 'assistant' and '</think>' in content -%}
{%- set thoughts = content.split('</think>')[0].split('<think>')[-1] -%}
{%- set content = content.split('</think>')[-1].lstrip('\\n') -%}
{%- endif -%}
{%- if message.role == 'assistant' and loop.index0 > ns.last and thoughts -%}
{{- '<think>\\n' + thoughts.strip('\\n') + '\\n</think>\\n\\n' -}}
{%- endif -%}
"""

_NO_THINKING = (
    "{%- if enable_thinking is defined and not enable_thinking -%}"
    "{{- '<think>\\n\\n</think>\\n\\n' -}}{%- endif -%}"
)

_LLAMA3 = """{{- bos_token -}}
{%- set has_system = messages[0].role == 'system' -%}
{%- if tools or has_system -%}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' -}}
{{- (messages[0].content if has_system else '') | trim -}}
{{- ('\\n\\n' if has_system else '') + write_tools() if tools else '' -}}
{{- '<|eot_id|>' -}}
{%- endif -%}
{%- for message in (messages[1:] if has_system else messages) -%}
{{- '<|start_header_id|>' + ('ipython' if message.role == 'tool' else message.role) -}}
{{- '<|end_header_id|>\\n\\n' + (message.content or '') | trim -}}
{{- write_calls(message.tool_calls) if message.tool_calls else '' -}}
{{- '<|eot_id|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}{%- endif -%}
"""

_SIMPLE = """{{- write_tools() + '\\n\\n' if tools else '' -}}
{%- for message in messages -%}
{%- if message.role == 'assistant' -%}
{{- 'Assistant: ' + (message.content or '') -}}
{{- write_calls(message.tool_calls) if message.tool_calls else '' -}}
{{- eos_token + '\\n' -}}
{%- else -%}
{{- message.role | capitalize + ': ' + (message.content or '') + '\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- 'Assistant: ' -}}{%- endif -%}
"""


def _fill(template: str, *, last_user: str = "", thinking: str = "", no_thinking: str = "") -> str:
    if thinking:
        template = template.replace("{{- message.content or '' -}}", "{{- content -}}")
    return (
        template.replace("LAST_USER", last_user)
        .replace("NO_THINKING", no_thinking)
        .replace("THINKING", thinking)
    )


TEMPLATES = {
    "chatml": _fill(_CHATML),
    "qwen3": _fill(_CHATML, last_user=_LAST_USER, thinking=_THINKING, no_thinking=_NO_THINKING),
    "llama3": _CALLS + _TOOLS + _LLAMA3,
    "simple": _CALLS + _TOOLS + _SIMPLE,
}


def load_template(name: str) -> str:
    """Return a template by name, or from a file.

    Raises:
        DataError: There is no such template, the file cannot be read, or it is not valid Jinja.
    """
    if name in TEMPLATES:
        return TEMPLATES[name]
    path = Path(name).expanduser()
    try:
        source = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise DataError(
            f"data.template: {name} is neither a template ({', '.join(TEMPLATES)}) nor a readable file",
            hint="name one of these, or the path of a .jinja file",
        ) from error
    parse_template(source)
    return source
