"""Chat templates that behave like those of public model families, written for these tests, and their probed facts.

Each is as small as the behavior allows. docs/chat-templates.md has the table of the facts.
"""

from typing import NamedTuple


class Shape(NamedTuple):
    """A template, and what a probe of it finds."""

    family: str
    template: str
    arguments: tuple[str, ...] = ()
    system: bool = True
    tools: bool = False
    calls: str | None = None
    thinking: str = "all"
    reasoning: bool = False
    opens: str = ""
    end: str = ""
    tags: bool = False


GENERATE = "{% if add_generation_prompt %}PROMPT{% endif %}"
IM = "{{ '<|im_start|>' + m.role + '\n' }}"
IM_PROMPT = GENERATE.replace("PROMPT", "{{ '<|im_start|>assistant\n' }}")
TOOL_LIST = "{% if tools %}{% for t in tools %}{{ t | tojson + '\n' }}{% endfor %}{% endif %}"
LAST = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
)
SPLIT = (
    "{% set text = m.content or '' %}{% set thought = m.reasoning_content or '' %}"
    "{% if '</think>' in text %}{% set thought = text.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{% set text = text.split('</think>')[-1].lstrip('\n') %}{% endif %}"
)
WRITE_LAST = (
    "{% if m.role == 'assistant' and loop.index0 > ns.last and thought %}"
    "{{ '<think>\n' + thought + '\n</think>\n\n' }}{% endif %}{{ text }}"
)


def calls(arguments):
    """Return the part of a template that writes tool calls, with an expression for their arguments."""
    return (
        "{% for c in m.tool_calls or [] %}{{ '<tool_call>' + c.function.name + ' ' }}"
        f"{{{{ {arguments} }}}}{{{{ '</tool_call>' }}}}{{% endfor %}}"
    )


OBJECT = calls("c.function.arguments | tojson")
TEXT = calls("'' + c.function.arguments")
EITHER = calls("c.function.arguments if c.function.arguments is string else c.function.arguments | tojson")
ITEMS = (
    "{% for c in m.tool_calls or [] %}{{ '<tool_call>' + c.function.name }}"
    "{% for k, v in c.function.arguments.items() %}{{ '<key>' + k + '</key><value>' + v | string + '</value>' }}"
    "{% endfor %}{{ '</tool_call>' }}{% endfor %}"
)


def loop(body):
    return f"{{% for m in messages %}}{body}{{% endfor %}}"


THINKING_CHATML = TOOL_LIST + LAST + loop(IM + SPLIT + WRITE_LAST + EITHER + "{{ '<|im_end|>\n' }}")

SHAPES = [
    Shape(
        "SmolLM2",
        "{% if messages[0].role != 'system' %}{{ '<|im_start|>system\nYou help.<|im_end|>\n' }}{% endif %}"
        + loop(IM + "{{ m.content + '<|im_end|>\n' }}")
        + IM_PROMPT,
        end="<|im_end|>\n",
    ),
    Shape(
        "Qwen2.5",
        TOOL_LIST + loop(IM + "{{ m.content or '' }}" + OBJECT + "{{ '<|im_end|>\n' }}") + IM_PROMPT,
        ("tools",),
        tools=True,
        calls="object",
        end="<|im_end|>\n",
    ),
    Shape(
        "Qwen3",
        THINKING_CHATML
        + IM_PROMPT.replace(
            "{% endif %}",
            "{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
            "{% endif %}",
        ),
        ("enable_thinking", "tools"),
        tools=True,
        calls="either",
        thinking="last",
        reasoning=True,
        end="<|im_end|>\n",
    ),
    Shape(
        "Qwen3 Thinking",
        THINKING_CHATML + IM_PROMPT.replace("assistant\n", "assistant\n<think>\n"),
        ("tools",),
        tools=True,
        calls="either",
        thinking="last",
        reasoning=True,
        opens="<think>\n",
        end="<|im_end|>\n",
    ),
    Shape(
        "DeepSeek-R1",
        "{{ bos_token }}"
        + loop(
            "{% if m.role == 'assistant' %}{{ '<A>' + (m.content or '').split('</think>')[-1] }}"
            + TEXT
            + "{{ eos_token }}{% else %}{{ '<' + m.role + '>' + m.content }}{% endif %}"
        )
        + GENERATE.replace("PROMPT", "{{ '<A><think>\n' }}"),
        calls="json",
        thinking="none",
        opens="<think>\n",
        end="<|end|>",
    ),
    Shape(
        "DeepSeek-V3.1",
        loop(
            "{% if m.role == 'assistant' %}{{ '<A></think>' + (m.content or '').split('</think>')[-1] }}"
            + TEXT
            + "{{ eos_token }}{% else %}{{ '<' + m.role + '>' + m.content }}{% endif %}"
        )
        + GENERATE.replace("PROMPT", "{{ '<A>' + ('<think>' if thinking else '</think>') }}"),
        ("thinking",),
        calls="json",
        thinking="none",
        end="<|end|>",
    ),
    Shape(
        "Llama 3.1",
        "{{ bos_token + strftime_now('%d %b %Y') }}"
        + TOOL_LIST
        + loop(
            "{% if m.tool_calls %}{% if m.tool_calls | length != 1 %}{{ raise_exception('one call') }}{% endif %}"
            "{{ '<H>assistant\n\n' }}" + OBJECT + "{{ '<|eot_id|>' }}{% else %}"
            "{{ '<H>' + m.role + '\n\n' + m.content | trim + '<|eot_id|>' }}{% endif %}"
        )
        + GENERATE.replace("PROMPT", "{{ '<H>assistant\n\n' }}"),
        ("tools",),
        tools=True,
        calls="object",
        end="<|eot_id|>",
    ),
    Shape(
        "Mistral",
        "{{ bos_token }}"
        + loop(
            "{% if m.role == 'user' %}{% if loop.last and tools %}{{ '[TOOLS]' + tools | tojson }}{% endif %}"
            "{{ '[INST] ' + m.content + '[/INST]' }}{% elif m.role == 'assistant' %}{{ ' ' + (m.content or '') }}"
            + OBJECT
            + "{{ eos_token }}{% elif m.role == 'tool' %}{{ '[RESULT]' + m.content }}"
            "{% else %}{{ raise_exception('no system') }}{% endif %}"
        ),
        ("tools",),
        system=False,
        tools=True,
        calls="object",
        end="<|end|>",
    ),
    Shape(
        "Gemma 2",
        "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        + loop(
            "{{ '<turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' + m.content | trim + '<end>\n' }}"
        )
        + GENERATE.replace("PROMPT", "{{ '<turn>model\n' }}"),
        system=False,
        end="<end>\n",
    ),
    Shape(
        "Phi-4",
        loop("{{ '<|im_start|>' + m.role + '<|im_sep|>' + m.content + '<|im_end|>' }}")
        + GENERATE.replace("PROMPT", "{{ '<|im_start|>assistant<|im_sep|>' }}"),
        end="<|im_end|>",
    ),
    Shape(
        "OLMo 2",
        "{{ bos_token }}"
        + loop(
            "{{ '<|' + m.role + '|>\n' + m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}"
            "{{ '\n' if not loop.last or m.role != 'assistant' }}"
        )
        + GENERATE.replace("PROMPT", "{{ '<|assistant|>\n' }}"),
        end="<|end|>",
    ),
    Shape(
        "Zephyr",
        loop(
            "{{ '<|' + m.role + '|>\n' + m.content + eos_token + '\n' }}"
            "{% if loop.last and add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
        ),
        end="<|end|>\n",
    ),
    Shape(
        "SmolLM3",
        "{% set think = enable_thinking if enable_thinking is defined else true %}"
        + loop(
            IM
            + "{% if m.role == 'assistant' %}{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
            "{% else %}{{ m.content + '<|im_end|>\n' }}{% endif %}"
        )
        + GENERATE.replace(
            "PROMPT", "{{ '<|im_start|>assistant\n' + ('' if think else '<think>\n\n</think>\n\n') }}"
        ),
        ("enable_thinking",),
        end="<|im_end|>\n",
        tags=True,
    ),
    Shape(
        "gpt-oss",
        "{{ '<S>system reasoning: ' + (reasoning_effort or 'medium') + '<E>' }}"
        + TOOL_LIST
        + LAST
        + loop(
            "{% if m.role == 'assistant' %}{% if m.thinking and loop.index0 > ns.last %}"
            "{{ '<S>assistant<C>analysis<M>' + m.thinking + '<E>' }}{% endif %}"
            "{% for c in m.tool_calls or [] %}{{ '<S>assistant to=' + c.function.name + '<M>' }}"
            "{{ c.function.arguments | tojson }}{{ '<E>' }}{% else %}"
            "{{ '<S>assistant<C>final<M>' + m.content + '<R>' }}{% endfor %}"
            "{% else %}{{ '<S>' + m.role + '<M>' + m.content + '<E>' }}{% endif %}"
        )
        + GENERATE.replace("PROMPT", "{{ '<S>assistant' }}"),
        ("reasoning_effort", "tools"),
        tools=True,
        calls="object",
        reasoning=True,
        end="<R>",
    ),
    Shape(
        "Command R",
        "{% if documents %}{{ documents | tojson }}{% endif %}"
        + TOOL_LIST
        + loop("{{ '<T><' + m.role + '>' + (m.content or '') }}" + OBJECT + "{{ '<ET>' }}")
        + GENERATE.replace("PROMPT", "{{ '<T><assistant>' }}"),
        ("documents", "tools"),
        tools=True,
        calls="object",
        end="<ET>",
    ),
    Shape(
        "GLM-4.5",
        TOOL_LIST
        + LAST
        + loop(
            "{{ '<|' + m.role + '|>\n' }}"
            + SPLIT
            + "{% if m.role == 'assistant' %}{{ '<think>' + (thought if loop.index0 > ns.last else '') + '</think>\n' }}"
            "{% endif %}{{ text }}" + ITEMS
        )
        + GENERATE.replace(
            "PROMPT",
            "{{ '<|assistant|>\n' + ('<think></think>' if enable_thinking is defined and not enable_thinking else '') }}",
        ),
        ("enable_thinking", "tools"),
        tools=True,
        calls="object",
        thinking="last",
        reasoning=True,
        end="",
    ),
    Shape(
        "Kimi K2",
        TOOL_LIST
        + loop("{{ '<|im_' + m.role + '|>' + (m.content or '') }}" + EITHER + "{{ '<|im_end|>' }}")
        + GENERATE.replace("PROMPT", "{{ '<|im_assistant|>' }}"),
        ("tools",),
        tools=True,
        calls="either",
        end="<|im_end|>",
    ),
    Shape(
        "Granite 3",
        "{% if tools %}{{ '<R>tools' + tools | tojson + '<E>\n' }}{% endif %}"
        "{% if documents %}{{ documents | tojson }}{% endif %}{% if thinking %}{{ 'Think first.' }}{% endif %}"
        + loop("{{ '<R>' + m.role + '<ER>' + m.content + '<E>\n' }}")
        + GENERATE.replace("PROMPT", "{{ '<R>assistant<ER>' }}"),
        ("documents", "thinking", "tools"),
        tools=True,
        end="<E>\n",
    ),
]
