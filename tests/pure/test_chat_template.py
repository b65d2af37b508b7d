"""Chat prompts equal transformers' to the character, whatever the template does and wherever it stands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from mpiinfer.errors import ModelError, MpiinferError, RequestError
from mpiinfer.text.tokenizer import Tokenizer
from tests.pure.sample_tokenizers import byte_level, gguf_metadata, sentence_piece

Messages = list[dict[str, Any]]
reference: Any = transformers

LLAMA3 = """{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}
    {{- "Environment: ipython\\n" }}
{%- endif %}
{{- "Today Date: " + strftime_now("%Y") + "\\n\\n" + system_message + "<|eot_id|>" }}
{%- for message in messages %}
    {%- if message.role == 'ipython' %}{%- continue %}{%- endif %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
CHATML = """{% for message in messages %}
{% if loop.first and message.role != 'system' %}
<|im_start|>system
You are helpful<|im_end|>
{% endif %}
    {% generation %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endgeneration %}
{% endfor %}
{% if add_generation_prompt %}
<|im_start|>assistant
{% endif %}
"""
MISTRAL = """{{ bos_token }}{% for message in messages %}\
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}\
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}\
{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}\
{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token }}\
{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"""
EVERYTHING_AS_JSON = """{%- set ns = namespace(count=0) -%}
{%- for message in messages -%}
    {%- set ns.count = ns.count + 1 -%}
    {{ message | tojson }} {{ message | tojson(indent=2) }} {{ dict(a=message.content) | tojson(ensure_ascii=True) }}
    {%- if ns.count == 4 %}{% break %}{% endif %}
{% endfor -%}
{{ ns.count }} {{ messages | tojson(separators=(',', ':'), sort_keys=true) }} {{ undefined_name }}
{{- documents is none }} {{ tools is none }} {{ unk_token }}"""
REASONING = """{% for m in messages %}{{ m.reasoning_content }}|{{ m.thinking }}|{{ m.reasoning }}|{{ m | tojson }}
{% endfor %}{{ messages[0].missing is defined }}"""
TEMPLATES = {
    "Llama 3": LLAMA3,
    "ChatML": CHATML,
    "Mistral": MISTRAL,
    "JSON": EVERYTHING_AS_JSON,
    "reasoning": REASONING,
}

CONVERSATIONS: dict[str, Messages] = {
    "one": [{"role": "user", "content": "Hello"}],
    "system": [{"role": "system", "content": "  Be brief. "}, {"role": "user", "content": "Hi\n"}],
    "turns": [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "d"},
        {"role": "user", "content": "e"},
    ],
    "unicode": [{"role": "user", "content": "Größe <b>'\"&</b> 🙂 東京 \u2028 {{ bos_token }} {% raw %}"}],
    "special": [{"role": "user", "content": "<|im_end|>\n<|im_start|>system\n<s>"}],
    "reasoning": [
        {"role": "user", "content": "q", "name": None},
        {"role": "assistant", "content": "a", "reasoning": "because"},
        {"role": "user", "content": "q", "thinking": "hm", "reasoning_content": None},
    ],
    "tool call": [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {"x": 1}}}]},
    ],
}


def folder(path: Path, template: Any = None, **config: Any) -> Path:
    path.mkdir(exist_ok=True)
    byte_level().save(str(path / "tokenizer.json"))
    tokens = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "unk_token": "<|endoftext|>"}
    chat = {} if template is None else {"chat_template": template}
    (path / "tokenizer_config.json").write_text(json.dumps(tokens | chat | config))
    return path


def rendered_by_transformers(path: Path, messages: Messages) -> str | None:
    """None where transformers refuses."""
    tokenizer = reference.AutoTokenizer.from_pretrained(path)
    try:
        text: str = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except Exception:
        return None
    assert Tokenizer.from_folder(path).encode_chat(messages) == tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False
    )
    return text


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("template", TEMPLATES)
def test_prompt_equals_transformers(tmp_path: Path, template: str, conversation: str) -> None:
    messages = CONVERSATIONS[conversation]
    path = folder(tmp_path / "model", TEMPLATES[template])
    expected = rendered_by_transformers(path, messages)
    if expected is None:
        with pytest.raises(RequestError, match="chat template refuses the messages") as caught:
            Tokenizer.from_folder(path).apply_chat(messages)
        assert "\n" not in str(caught.value)
    else:
        assert Tokenizer.from_folder(path).apply_chat(messages) == expected


def test_folder_saved_by_transformers(tmp_path: Path) -> None:
    saved = reference.PreTrainedTokenizerFast(tokenizer_object=sentence_piece(), bos_token="<s>", eos_token="</s>")
    saved.chat_template = MISTRAL
    saved.save_pretrained(tmp_path / "one")
    assert (tmp_path / "one" / "chat_template.jinja").is_file()
    saved.chat_template = {"default": CHATML, "tool_use": MISTRAL}
    saved.save_pretrained(tmp_path / "two")
    assert (tmp_path / "two" / "additional_chat_templates" / "tool_use.jinja").is_file()
    for path in (tmp_path / "one", tmp_path / "two"):
        messages = CONVERSATIONS["turns"]
        assert Tokenizer.from_folder(path).apply_chat(messages) == rendered_by_transformers(path, messages)


def test_files_overrule_the_config(tmp_path: Path) -> None:
    path = folder(tmp_path / "model", "from the config")
    (path / "chat_template.jinja").write_text("from the file: {{ messages[0].content }}\n")
    assert Tokenizer.from_folder(path).apply_chat(CONVERSATIONS["one"]) == "from the file: Hello"
    assert rendered_by_transformers(path, CONVERSATIONS["one"]) == "from the file: Hello"


def test_named_templates_use_the_default(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    path = folder(tmp_path / "model", named)
    assert Tokenizer.from_folder(path).apply_chat(CONVERSATIONS["one"]) == "plain"
    assert rendered_by_transformers(path, CONVERSATIONS["one"]) == "plain"


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([], "messages: must be a list of at least one"),
        ("hello", "messages: must be a list"),
        (["hello"], r"messages\[0\]: must be"),
        ([{"content": "hi"}], r"messages\[0\].role: must be a string"),
        ([{"role": "user", "content": "hi"}, {"role": "assistant"}], r"messages\[1\].content: must be a string"),
        ([{"role": "user", "content": None}], r"messages\[0\].content"),
        ([{"role": 1, "content": "hi"}], r"messages\[0\].role"),
    ],
)
def test_what_is_no_conversation_is_a_request_error(tmp_path: Path, messages: Any, reason: str) -> None:
    tokenizer = Tokenizer.from_folder(folder(tmp_path / "model", CHATML))
    with pytest.raises(RequestError, match=reason) as caught:
        tokenizer.apply_chat(messages)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("template", "error", "reason"),
    [
        ("{% for m in messages %}", ModelError, "syntax error, line 1"),
        ("{{ messages | nofilter }}", ModelError, "syntax error"),
        ("{{ messages[9].content.x }}", RequestError, "refuses the messages"),
        ("{{ 'a' + 1 }}", RequestError, "refuses the messages: can only concatenate str"),
        ("{{ raise_exception('not\nso') }}", RequestError, "refuses the messages: not so; change them"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", RequestError, "unsafe"),
        ("{{ messages.append(1) }}", RequestError, "refuses the messages"),
    ],
)
def test_a_template_that_fails_is_one_line(
    tmp_path: Path, template: str, error: type[MpiinferError], reason: str
) -> None:
    tokenizer = Tokenizer.from_folder(folder(tmp_path / "model", template))
    with pytest.raises(error, match=reason) as caught:
        tokenizer.apply_chat([{"role": "user", "content": "hi"}])
    assert "tokenizer_config.json: chat_template" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("template", "key"),
    [
        (5, "chat_template = 5"),
        (True, "chat_template = True"),
        ({"default": 5}, "chat_template.default = 5"),
        ({"default": ["a"]}, "chat_template.default = "),
        ([{"name": "default", "template": 5}], "chat_template.default = 5"),
    ],
)
def test_a_template_that_is_no_string_names_file_and_key(tmp_path: Path, template: Any, key: str) -> None:
    path = folder(tmp_path / "model", template)
    with pytest.raises(ModelError) as caught:
        Tokenizer.from_folder(path)
    assert str(caught.value).startswith(f"{path / 'tokenizer_config.json'}: {key}")
    assert "must be a string" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["chat_template.jinja", "additional_chat_templates/default.jinja"])
def test_a_template_file_that_is_not_utf8_is_named(tmp_path: Path, name: str) -> None:
    path = folder(tmp_path / "model")
    (path / name).parent.mkdir(exist_ok=True)
    (path / name).write_bytes(b"{{ messages[0].content }} \xff")
    with pytest.raises(ModelError) as caught:
        Tokenizer.from_folder(path)
    assert str(caught.value).startswith(f"{path / name}: not UTF-8") and "\n" not in str(caught.value)


def test_what_a_gguf_file_has_for_a_template_or_an_id_names_file_and_key(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    metadata = gguf_metadata(sentence_piece(), "llama")
    for key, value in (("tokenizer.chat_template", 5), ("tokenizer.ggml.eot_token_id", "x")):
        with pytest.raises(ModelError) as caught:
            Tokenizer.from_gguf(metadata | {key: value}, file)
        assert str(caught.value).startswith(f"{file}: {key}") and "\n" not in str(caught.value)
