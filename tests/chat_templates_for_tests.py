"""Chat templates built as those of well-known model families are, in our own words."""

from __future__ import annotations

from tests.tokenizers_for_tests import CHATML

# System prompt inside the first user turn; the space before a reply belongs to the history only.
LLAMA2 = """
{%- set ns = namespace(system=none) -%}
{%- for m in messages -%}
  {%- if m.role == 'system' -%}
    {%- if not loop.first -%}{{ raise_exception('a system message must come first') }}{%- endif -%}
    {%- set ns.system = m.content -%}
  {%- elif m.role == 'user' -%}
    {%- if not loop.first and messages[loop.index0 - 1].role == 'user' -%}
      {{- raise_exception('roles must alternate') -}}
    {%- endif -%}
    {{- bos_token + '[INST] ' -}}
    {%- if ns.system is not none -%}
      {{- '<<SYS>>\\n' + ns.system + '\\n<</SYS>>\\n\\n' -}}{%- set ns.system = none -%}
    {%- endif -%}
    {{- m.content | trim + ' [/INST]' -}}
  {%- else -%}
    {%- if loop.first or messages[loop.index0 - 1].role != 'user' -%}
      {{- raise_exception('roles must alternate') -}}
    {%- endif -%}
    {{- ' ' + m.content | trim + ' ' + eos_token -}}
  {%- endif -%}
{%- endfor -%}
"""

# Header tokens, trimmed contents, a date in the system turn that is always there.
LLAMA3 = """
{%- if messages and messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}
    {%- set turns = messages[1:] %}
{%- else %}
    {%- set system = '' %}
    {%- set turns = messages %}
{%- endif %}
{{- bos_token + '<|start_header_id|>system<|end_header_id|>\\n\\nToday is ' }}
{{- strftime_now('%d %b %Y') + '.\\n\\n' + system + '<|eot_id|>' }}
{%- for m in turns %}
    {{- '<|start_header_id|>' + m['role'] + '<|end_header_id|>\\n\\n' }}
    {{- m['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

# The system prompt goes with the last user turn; replies end with EOS.
MISTRAL = """
{%- if messages[0].role == 'system' -%}
  {%- set system, turns = messages[0].content, messages[1:] -%}
{%- else -%}
  {%- set turns = messages -%}
{%- endif -%}
{{- bos_token -}}
{%- for m in turns -%}
  {%- if (m.role == 'user') != (loop.index0 % 2 == 0) -%}
    {{- raise_exception('roles must alternate user, assistant, user') -}}
  {%- endif -%}
  {%- if m.role == 'user' -%}
    {%- if loop.last and system is defined -%}
      {{- '[INST] ' + system + '\\n\\n' + m.content + '[/INST]' -}}
    {%- else -%}
      {{- '[INST] ' + m.content + '[/INST]' -}}
    {%- endif -%}
  {%- else -%}
    {{- ' ' + m.content + eos_token -}}
  {%- endif -%}
{%- endfor -%}
"""

# ChatML that keeps the reasoning of the last reply only, and shows an empty one where that has
# none.
QWEN3 = """
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}
    {%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for m in messages %}
    {%- if m.role == 'assistant' %}
        {%- set text, why = m.content, '' %}
        {%- if '</think>' in text %}
            {%- set why = text.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
            {%- set text = text.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.last %}
            {{- '<think>\\n' + why + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- text + '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

# Roles as text lines, EOS behind every content, the generation mark of training templates.
ZEPHYR = """
{% for m in messages %}
{{ '<|' + m['role'] + '|>\\n' -}}
{% generation %}{{ m['content'] }}{% endgeneration %}{{ eos_token + '\\n' -}}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>\\n' -}}
{% endif %}
{% endfor %}
"""

# No system turn, other names for roles, alternation, trimmed contents.
GEMMA = """
{{- bos_token -}}
{%- if messages[0]['role'] == 'system' -%}
  {{- raise_exception('System role not supported') -}}
{%- endif -%}
{%- for m in messages -%}
  {%- if (m['role'] == 'user') != (loop.index0 % 2 == 0) -%}
    {{- raise_exception('Conversation roles must alternate') -}}
  {%- endif -%}
  {%- set role = 'model' if m['role'] == 'assistant' else m['role'] -%}
  {{- '<start_of_turn>' + role + '\\n' + m['content'] | trim + '<end_of_turn>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<start_of_turn>model\\n' -}}{%- endif -%}
"""

# A text that is not to be continued ends with EOS.
PHI3 = """
{%- for m in messages -%}
  {{- '<|' + m['role'] + '|>\\n' + m['content'] + '<|end|>\\n' -}}
{%- endfor -%}
{{- '<|assistant|>\\n' if add_generation_prompt else eos_token -}}
"""

# The generation prompt opens the reasoning; history does not keep it.
DEEPSEEK_R1 = """
{{- bos_token -}}
{%- for m in messages -%}
  {%- if m['role'] == 'system' -%}{{- m['content'] -}}
  {%- elif m['role'] == 'user' -%}{{- '<|User|>' + m['content'] -}}
  {%- else -%}{{- '<|Assistant|>' + m['content'].split('</think>')[-1] + eos_token -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|Assistant|><think>\\n' -}}{%- endif -%}
"""

# Plain words for roles.
VICUNA = """
{%- if messages[0]['role'] == 'system' -%}{{- messages[0]['content'] + '\\n\\n' -}}{%- endif -%}
{%- for m in messages -%}
  {%- if m['role'] == 'user' -%}{{- 'USER: ' + m['content'] + '\\n' -}}
  {%- elif m['role'] == 'assistant' -%}{{- 'ASSISTANT: ' + m['content'] + eos_token + '\\n' -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- 'ASSISTANT:' -}}{%- endif -%}
"""

ALL = {
    "chatml": CHATML,
    "llama2": LLAMA2,
    "llama3": LLAMA3,
    "mistral": MISTRAL,
    "qwen3": QWEN3,
    "zephyr": ZEPHYR,
    "gemma": GEMMA,
    "phi3": PHI3,
    "deepseek-r1": DEEPSEEK_R1,
    "vicuna": VICUNA,
}
