"""Chat templates in the style of published ones, each with a feature that makes rendering hard."""

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are kind.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# trims contents, prints the date and the tools
TRIMS = """{{- bos_token }}
{%- set date_string = strftime_now("%d %b %Y") if strftime_now is defined else "26 Jul 2024" %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start|>system<|end|>\n\nToday: " + date_string + "\n" }}
{%- if tools is not none and tools %}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\n\n" }}
    {%- endfor %}
{%- endif %}
{{- system_message }}
{{- "<|eot|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start|>' + message['role'] + '<|end|>\n\n'+ message['content'] | trim + '<|eot|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|start|>assistant<|end|>\n\n' }}
        {{- '{"name": "' + tool_call.name + '", ' }}
        {{- '"parameters": ' }}
        {{- tool_call.arguments | tojson }}
        {{- "}" }}
        {{- "<|eot|>" }}
    {%- else %}
        {{- "<|start|>ipython<|end|>\n\n" }}
        {{- message.content | tojson if message.content is mapping else message.content }}
        {{- "<|eot|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start|>assistant<|end|>\n\n' }}
{%- endif %}
"""

# checks that roles alternate; another name for the assistant
ALTERNATES = """{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}
{% endif %}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}
{% if (message['role'] == 'assistant') %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}{% endif %}
{{ '<turn>' + role + '\n' + message['content'] | trim + '<end>\n' }}{% endfor %}
{% if add_generation_prompt %}{{'<turn>model\n'}}{% endif %}"""

# removes the reasoning of all turns before the last user message; scans backwards first
THINKS = """{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}
        {%- set content = message.content %}
    {%- else %}
        {%- set content = '' %}
    {%- endif %}
    {%- if message.role == "user" or message.role == "system" %}
        {{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>' + '\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index and (THINK_LAST or reasoning) %}
            {{- '<|im_start|>' + message.role + '\n<think>\n' + reasoning.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\n' + content }}
        {%- endif %}
        {%- if message.tool_calls %}
            {%- for tool_call in message.tool_calls %}
                {%- if tool_call.function %}{%- set tool_call = tool_call.function %}{%- endif %}
                {{- '\n<tool_call>\n{"name": "' ~ tool_call.name ~ '", "arguments": ' ~ (tool_call.arguments | tojson) ~ '}\n</tool_call>' }}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\n<tool_response>\n' }}{{- content }}{{- '\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}{{- '<|im_end|>\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
"""

# writes the generation prompt inside the loop; a macro writes the turns
IN_LOOP = """{% macro turn(role, text) -%}<|{{ role }}|>
{{ text }}{%- endmacro %}
{% for message in messages %}{{ turn(message.role, message.content) }}{{ eos_token }}
{% if loop.last and add_generation_prompt %}<|assistant|>
{% endif %}{% endfor %}"""

# MARKS: generation tags; COLLECTS: gathers the text in a namespace and prints it at the end
MARKS = """{% set ns = namespace(text='') %}{% for m in messages %}{% if m.role == 'assistant' %}A: {% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}
{% else %}{{ m.role | capitalize }}: {{ m.content }}
{% endif %}{% endfor %}{% if add_generation_prompt %}A: {% endif %}"""
COLLECTS = """{% set ns = namespace(text='') %}{% for m in messages %}{% set ns.text = ns.text ~ '[' ~ m.role ~ '] ' ~ m.content ~ '\n' %}{% endfor %}{{ ns.text }}{% if add_generation_prompt %}[assistant] {% endif %}"""

TEMPLATES = {
    "chatml": CHATML,
    "trims": TRIMS,
    "alternates": ALTERNATES,
    "thinks": THINKS.replace("THINK_LAST", "false"),
    "thinks last": THINKS.replace("THINK_LAST", "loop.last"),
    "in loop": IN_LOOP,
    "marks": MARKS,
    "collects": COLLECTS,
}
