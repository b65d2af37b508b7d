"""Builds `TokenizerParts` from a Hugging Face folder: tokenizer.json and the small files beside it.

Promises the ids of tokenizer.json, read by the `tokenizers` library, with two rules of transformers on top:

- The post-processor of tokenizer.json alone says whether BOS and EOS are added: `add_bos_token` and `add_eos_token` of
  tokenizer_config.json are ignored.
- Tokens named in the small files are added to the vocabulary when they are missing there.

tokenizer.json wins where transformers 5 puts the pipeline of a tokenizer class in its place: a folder whose class is
GPT2Tokenizer would lose the rule that its digits stand alone, and the model was trained with that rule.

Refuses to know GGUF, rendering, and sentencepiece or tiktoken files without a tokenizer.json.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, models

from mpiinfer.errors import ModelError
from mpiinfer.text.parts import TokenizerParts

Config = dict[str, Any]

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def load_folder(path: Path) -> TokenizerParts:
    """Raises ModelError when the folder has no readable tokenizer.json or a small file is malformed."""
    file = path / "tokenizer.json"
    if not file.is_file():
        raise ModelError(f"{path}: no tokenizer.json; save one there with transformers' AutoTokenizer.save_pretrained")
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # The library raises plain Exception for all that can be wrong with a file.
        reason = " ".join(str(error).split())
        raise ModelError(f"{file}: the tokenizers library cannot read it ({reason:.200}); fetch it again") from error
    try:
        return _complete(path, backend)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        reason = " ".join(f"malformed entry ({type(error).__name__}: {error})".split())
        raise ModelError(f"{path / 'tokenizer_config.json'}: {reason}; fetch it again") from error


def _complete(path: Path, backend: tokenizers.Tokenizer) -> TokenizerParts:
    """What the small files make of tokenizer.json."""
    backend.no_padding()
    backend.no_truncation()
    config = _small_file(path / "tokenizer_config.json")
    if "added_tokens_decoder" not in config:  # An old folder spreads its tokens over more files.
        config.update(_small_file(path / "special_tokens_map.json"))
    named = _named_tokens(config)
    _add_tokens(backend, _listed_tokens(backend, path, config, named), config, named)
    backend.encode_special_tokens = bool(config.get("split_special_tokens", False))
    return _parts(path, config, backend, {key: _content(value) for key, value in named.items()})


def _parts(path: Path, config: Config, backend: tokenizers.Tokenizer, special: dict[str, str]) -> TokenizerParts:
    template, source = _chat_template(path, config)
    ids = {key: backend.token_to_id(token) for key, token in special.items()}
    eos = ids.get("eos_token")
    clean_bpe = config.get("clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output", False)
    is_bpe = isinstance(backend.model, models.BPE)
    return TokenizerParts(
        path=path,
        backend=backend,
        bos_token_id=ids.get("bos_token"),
        eos_token_ids=frozenset() if eos is None else frozenset({eos}),
        special_tokens=special,
        chat_template=template,
        chat_template_source=source,
        clean_up=bool(config.get("clean_up_tokenization_spaces", False)) and (not is_bpe or bool(clean_bpe)),
    )


def _small_file(file: Path) -> Config:
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_bytes())
    except ValueError as error:
        raise ModelError(f"{file}: not JSON ({error}); fetch it again") from error
    if not isinstance(value, dict):
        raise ModelError(f"{file}: must hold a JSON object; fetch it again")
    return value


def _content(token: str | Config) -> str:
    return token if isinstance(token, str) else str(token["content"])


def _added_token(token: str | Config, special: bool) -> AddedToken:
    """As an entry of a small file spells it; `special` holds where the entry does not say."""
    if isinstance(token, str):
        return AddedToken(token, special=special)
    flags = {key: token[key] for key in ("single_word", "lstrip", "rstrip", "normalized") if key in token}
    return AddedToken(token["content"], special=token.get("special", special), **flags)


def _is_token(value: object) -> bool:
    return isinstance(value, str) or (isinstance(value, dict) and isinstance(value.get("content"), str))


def _named_tokens(config: Config) -> dict[str, str | Config]:
    """`bos_token` and its like; null means none."""
    named = {key: config[key] for key in _NAMED_TOKENS if _is_token(config.get(key))}
    own = {key: value for key, value in config.items() if key.endswith("_token") and isinstance(value, str)}
    named.update({key: value for key, value in own.items() if key not in _NAMED_TOKENS})
    extra = config.get("extra_special_tokens")
    if isinstance(extra, dict):
        named.update({key: value for key, value in extra.items() if _is_token(value)})
    return named


def _extra_tokens(config: Config) -> list[str | Config]:
    """Special tokens without a name."""
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    return [token for token in extra if _is_token(token)] if isinstance(extra, list) else []


def _listed_tokens(
    backend: tokenizers.Tokenizer, path: Path, config: Config, named: dict[str, str | Config]
) -> list[AddedToken]:
    """The added tokens that the folder numbers, in the order of their ids."""
    if "added_tokens_decoder" in config:
        listed = {int(index): _added_token(token, False) for index, token in config["added_tokens_decoder"].items()}
    else:
        names = {_content(token) for token in named.values()}
        old = _small_file(path / "added_tokens.json")
        listed = {i: AddedToken(t, special=t in names, normalized=t not in names) for t, i in old.items()}
        listed.update(backend.get_added_tokens_decoder())
    return [listed[index] for index in sorted(listed)]


def _add_tokens(
    backend: tokenizers.Tokenizer, listed: list[AddedToken], config: Config, named: dict[str, str | Config]
) -> None:
    """To the vocabulary: `listed`, then the tokens that have a name but no number. A name makes a token special."""
    tokens = [*listed]
    known = {token.content for token in [*listed, *backend.get_added_tokens_decoder().values()]}
    for token in [*named.values(), *_extra_tokens(config)]:
        if _content(token) not in known:
            known.add(_content(token))
            tokens.append(_added_token(token, True))
    special = {_content(token) for token in named.values()}
    for added in tokens:
        added.special = added.special or added.content in special
    backend.add_tokens(tokens)


def _chat_template(path: Path, config: Config) -> tuple[str | None, str]:
    """The default template and where it stands. Files overrule tokenizer_config.json."""
    files = {"default": path / "chat_template.jinja"} if (path / "chat_template.jinja").is_file() else {}
    files.update({file.stem: file for file in (path / "additional_chat_templates").glob("*.jinja")})
    if files:
        if "default" not in files:
            raise ModelError(
                f"{path}/additional_chat_templates: no default.jinja among {sorted(files)}; name one of them so"
            )
        return _template_file(files["default"]), str(files["default"])
    where = f"{path / 'tokenizer_config.json'}: chat_template"
    template = config.get("chat_template")
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}
    key = ""
    if isinstance(template, dict):
        if "default" not in template:
            raise ModelError(f"{where}: no template named 'default' among {sorted(template)}; name one of them so")
        template, key = template["default"], ".default"
    if template is not None and not isinstance(template, str):
        raise ModelError(f"{where}{key} = {template!r:.80} must be a string; correct it or delete it")
    return template, where


def _template_file(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ModelError(f"{file}: not UTF-8 ({error}); save it so, or fetch it again") from None
