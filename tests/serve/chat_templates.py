"""Chat templates with the constructs of public ones, written for these tests, and what they make of a conversation."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

SYSTEM = {"role": "system", "content": "Be <brief> & kind."}
TALK = [
    {"role": "user", "content": " Who's there? "},
    {"role": "assistant", "content": '<think>\nHm.\n</think>\n\nShe "is".'},
    {"role": "user", "content": "Why – now?"},
]
TOOLS = [
    {
        "type": "function",
        "function": {"name": "age", "description": "<b>'é'</b>", "parameters": {"type": "object", "properties": {}}},
    }
]
DOCUMENTS = [{"title": "One", "text": "It is & was."}, {"title": "Two", "text": "<no>"}]
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}


class Row(NamedTuple):
    """A template, what it is given, and its text.

    Attributes:
      source: of the template.
      text: what it makes of `messages`.
      variables: beside the messages.
      messages: of the conversation.
    """

    source: str
    text: str
    variables: Mapping[str, Any] = MappingProxyType({})
    messages: Sequence[dict[str, str]] = (SYSTEM, *TALK)


LLAMA_3 = """{{- bos_token }}
{%- if not tools is defined %}
    {%- set tools = none %}
{%- endif %}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%Y")[:2] ~ "xx" %}
    {%- else %}
        {%- set date_string = "26 Jul 2024" %}
    {%- endif %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}
    {{- "Environment: ipython\\n" }}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
{%- endif %}
{{- "Today Date: " + date_string + "\\n\\n" }}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}
    {%- else %}
        {{- raise_exception("No tool calls") }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
_LLAMA_TALK = (
    "Be <brief> & kind.<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nWho's there?<|eot_id|>"
    '<|start_header_id|>assistant<|end_header_id|>\n\n<think>\nHm.\n</think>\n\nShe "is".<|eot_id|>'
    "<|start_header_id|>user<|end_header_id|>\n\nWhy – now?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
)
_LLAMA_TOOL = """{
    "type": "function",
    "function": {
        "name": "age",
        "description": "<b>'é'</b>",
        "parameters": {
            "type": "object",
            "properties": {}
        }
    }
}

"""

QWEN_3 = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- "# Tools\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- else %}
    {%- if messages[0].role == 'system' %}
        {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string
            and not(message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set content = message.content %}
        {%- set reasoning_content = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning_content = message.reasoning_content %}
        {%- else %}
            {%- if '</think>' in content %}
                {%- set reasoning_content = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
                {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
            {%- endif %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index %}
            {{- '<|im_start|>' + message.role + '\\n<think>\\n' + reasoning_content.strip('\\n') }}
            {{- '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\\n' + content }}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""
_QWEN_TALK = (
    '<|im_start|>user\n Who\'s there? <|im_end|>\n<|im_start|>assistant\nShe "is".<|im_end|>\n'
    "<|im_start|>user\nWhy – now?<|im_end|>\n<|im_start|>assistant\n"
)
_QWEN_SYSTEM = "<|im_start|>system\nBe <brief> & kind."

MISTRAL = """{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- set ns = namespace() %}
{%- set ns.index = 0 %}
{%- for message in loop_messages %}
    {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}
        {{- raise_exception("After the optional system message, roles must alternate user/assistant/user/assistant/...") }}
    {%- endif %}
    {%- set ns.index = ns.index + 1 %}
{%- endfor %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and (message == loop_messages[-1]) %}
            {{- "[AVAILABLE_TOOLS] [" }}
            {%- for tool in tools %}
                {%- set tool = tool.function %}
                {{- '{"type": "function", "function": {' }}
                {%- for key, val in tool.items() if key != "return" %}
                    {%- if val is string %}
                        {{- '"' + key + '": "' + val + '"' }}
                    {%- else %}
                        {{- '"' + key + '": ' + val|tojson }}
                    {%- endif %}
                    {%- if not loop.last %}
                        {{- ", " }}
                    {%- endif %}
                {%- endfor %}
                {{- "}}" }}
                {%- if not loop.last %}{{- ", " }}{%- else %}{{- "]" }}{%- endif %}
            {%- endfor %}
            {{- "[/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message["role"] == "assistant" %}
        {{- " " + message["content"]|trim + eos_token }}
    {%- endif %}
{%- endfor %}
"""
_MISTRAL_FIRST = '<s>[INST]  Who\'s there? [/INST] <think>\nHm.\n</think>\n\nShe "is".</s>'

GEMMA = """{{ bos_token }}{%- if messages[0]['role'] == 'system' -%}
    {%- set first_user_prefix = messages[0]['content'] + '\\n\\n' -%}
    {%- set loop_messages = messages[1:] -%}
{%- else -%}
    {%- set first_user_prefix = "" -%}
    {%- set loop_messages = messages -%}
{%- endif -%}
{%- for message in loop_messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("Conversation roles must alternate user/assistant/user/assistant/...") }}
    {%- endif -%}
    {%- if (message['role'] == 'assistant') -%}
        {%- set role = "model" -%}
    {%- else -%}
        {%- set role = message['role'] -%}
    {%- endif -%}
    {{ '<start_of_turn>' + role + '\\n' + (first_user_prefix if loop.first else "") }}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}{{ item['text'] | trim }}{%- endfor -%}
    {%- else -%}
        {{ raise_exception("Invalid content type") }}
    {%- endif -%}
    {{ '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{'<start_of_turn>model\\n'}}
{%- endif -%}
"""

DEEPSEEK = (
    "{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}"
    "{% set ns = namespace(is_first=false, is_tool=false, system_prompt='', is_first_sp=true) %}"
    "{%- for message in messages %}{%- if message['role'] == 'system' %}{%- if ns.is_first_sp %}"
    "{% set ns.system_prompt = ns.system_prompt + message['content'] %}{% set ns.is_first_sp = false %}{%- else %}"
    "{% set ns.system_prompt = ns.system_prompt + '\\n\\n' + message['content'] %}{%- endif %}{%- endif %}{%- endfor %}"
    "{{ bos_token }}{{ ns.system_prompt }}{%- for message in messages %}{%- if message['role'] == 'user' %}"
    "{%- set ns.is_tool = false -%}{{'<｜User｜>' + message['content']}}{%- endif %}"
    "{%- if message['role'] == 'assistant' and not message['tool_calls'] %}{% set content = message['content'] %}"
    "{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}"
    "{{'<｜Assistant｜>' + content + '<｜end▁of▁sentence｜>'}}{%- endif %}{%- endfor -%}"
    "{% if add_generation_prompt and not ns.is_tool %}{{'<｜Assistant｜><think>\\n'}}{% endif %}"
)

GENERATION = """{%- for message in messages %}
{%- if message.role == 'assistant' %}
<|assistant|>
{% generation %}{% set said = message.content %}{{ said }}{{ eos_token }}{% endgeneration %}
{{ '' if said is defined else '.' }}
{% else %}
<|{{ message.role }}|>
{{ message.content }}
{% endif %}
{% endfor %}
{% if add_generation_prompt %}<|assistant|>
{% endif %}"""

LOOPS = """{% macro show(message, name='') %}{{ name | upper }}[{{ message.content | trim | replace('\\n', ' ') }}]{% endmacro %}
{%- for message in messages %}
    {%- if message.role == 'system' %}{% continue %}{% endif %}
    {%- if loop.index > 3 %}{% break %}{% endif %}
    {{- show(message, name=message.role) }}{{ ',' if not loop.last }}
{%- endfor %}
{% filter upper %}{{ messages | map(attribute='role') | unique | join('/') }}{% endfilter %}
{{ messages | selectattr('role', 'equalto', 'user') | list | length }} {{
    {'b': [1, 2.5, none, true], 'a': '<é>'} | tojson(sort_keys=true, separators=(',', ':'))
}} {{ 'é' | tojson(ensure_ascii=true) }}
{% set found = namespace(roles=[]) %}{% for message in messages %}{%
    set found.roles = found.roles + [message.role[0]] %}{% endfor %}{{ found.roles | join }} {{ dict(a=1).items() | list }} {{
    "%s-%d" | format('x', 3) }} {{ unset }}{{ unset | default('none', true) }}
"""

DOCUMENTED = """{% for document in documents or [] %}Document: {{ loop.index0 }}
{{ document.title }}
{{ document['text'] }}

{% endfor %}
{% for message in messages %}{{ message.name ~ ': ' if message.name }}{{ message.content }}
{% endfor %}"""

STRICT = "{% if messages[0].role != 'user' %}{{ raise_exception('Only user first, got ' ~ messages[0].role) }}{% endif %}fine"

ROWS = {
    "llama 3": Row(LLAMA_3, f"<s><|start_header_id|>system<|end_header_id|>\n\nToday Date: 20xx\n\n{_LLAMA_TALK}"),
    "llama 3, tools and date": Row(
        LLAMA_3,
        f"<s><|start_header_id|>system<|end_header_id|>\n\nEnvironment: ipython\n{_LLAMA_TOOL}Today Date: today\n\n{_LLAMA_TALK}",
        {"tools": TOOLS, "date_string": "today"},
    ),
    "qwen 3": Row(QWEN_3, f"{_QWEN_SYSTEM}<|im_end|>\n{_QWEN_TALK}"),
    "qwen 3, no thinking": Row(QWEN_3, f"{_QWEN_TALK}<think>\n\n</think>\n\n", {"enable_thinking": False}, TALK),
    "qwen 3, tools": Row(
        QWEN_3,
        f'{_QWEN_SYSTEM}\n\n# Tools\n<tools>\n{{"type": "function", "function": {{"name": "age", "description": "<b>\'é\'</b>", '
        f'"parameters": {{"type": "object", "properties": {{}}}}}}}}\n</tools><|im_end|>\n{_QWEN_TALK}',
        {"tools": TOOLS},
    ),
    "mistral": Row(MISTRAL, f"{_MISTRAL_FIRST}[INST] Be <brief> & kind.\n\nWhy – now?[/INST]"),
    "mistral, tools": Row(
        MISTRAL,
        f'{_MISTRAL_FIRST}[AVAILABLE_TOOLS] [{{"type": "function", "function": {{"name": "age", "description": "<b>\'é\'</b>", '
        '"parameters": {"type": "object", "properties": {}}}}][/AVAILABLE_TOOLS][INST] Why – now?[/INST]',
        {"tools": TOOLS},
        TALK,
    ),
    "gemma": Row(
        GEMMA,
        "<s><start_of_turn>user\nBe <brief> & kind.\n\nWho's there?<end_of_turn>\n<start_of_turn>model\n<think>\nHm.\n</think>\n\n"
        'She "is".<end_of_turn>\n<start_of_turn>user\nWhy – now?<end_of_turn>\n<start_of_turn>model\n',
    ),
    "deepseek": Row(
        DEEPSEEK,
        '<s>Be <brief> & kind.<｜User｜> Who\'s there? <｜Assistant｜>\n\nShe "is".<｜end▁of▁sentence｜><｜User｜>Why – now?'
        "<｜Assistant｜><think>\n",
    ),
    "generation blocks": Row(
        GENERATION,
        '<|user|>\n Who\'s there? \n<|assistant|>\n<think>\nHm.\n</think>\n\nShe "is".</s>.\n<|user|>\nWhy – now?\n<|assistant|>\n',
        messages=TALK,
    ),
    "loops, macros and filters": Row(
        LOOPS,
        'USER[Who\'s there?],ASSISTANT[<think> Hm. </think>  She "is".],SYSTEM/USER/ASSISTANT2 '
        '{"a":"<é>","b":[1,2.5,null,true]} "\\u00e9"\nsuau [(\'a\', 1)] x-3 none',
    ),
    "documents and names": Row(
        DOCUMENTED,
        "Document: 0\nOne\nIt is & was.\n\nDocument: 1\nTwo\n<no>\n\nAnn: Hello\nHi\n",
        {"documents": DOCUMENTS},
        [{"role": "user", "content": "Hello", "name": "Ann"}, {"role": "user", "content": "Hi"}],
    ),
}
