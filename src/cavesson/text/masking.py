"""Masking of secrets: passwords, tokens and keys, in texts and in settings.

Everything that is recorded, shown, logged, exported or pushed passes ``masked``, and settings that it would change are
refused. It knows a secret by what it is called, as in ``--api-key=…`` or ``?token=…``, or by its form, as ``hf_…``.
"""

import re
from collections.abc import Mapping
from typing import Any

MASK = "***"

_ALWAYS = {
    "apikey",
    "authorization",
    "cookie",
    "credential",
    "jwt",
    "passphrase",
    "passwd",
    "password",
    "pwd",
    "secret",
}
"""Words that make a name that of a secret."""
_OF_KEYS = {"access", "account", "api", "auth", "encryption", "private", "secret", "shared", "signing", "subscription"}
_OF_TOKENS = {
    "access", "api", "auth", "bearer", "bot", "csrf", "github", "gitlab", "hf", "hub", "huggingface", "key", "push",
    "refresh", "reward", "secret", "security", "server", "service", "session", "user", "wandb",
}  # fmt: skip
"""Words before "key" and "token", which are also words for data."""
_REFERENCES = {"env", "environment", "file", "path", "variable"}
"""Last words of names whose value only says where a secret is."""
_IN_QUERIES = {
    "auth",
    "code",
    "hash",
    "hmac",
    "k",
    "key",
    "otp",
    "pass",
    "sas",
    "session",
    "sessionid",
    "sid",
    "sig",
    "sign",
    "signature",
    "t",
    "tok",
    "token",
}
_PUBLIC = {"commit", "ref", "rev", "revision", "sha", "v", "version", "versionid"}
"""Names in the query of a URL: of secrets, and of long values that are none."""

_NAME = r"[A-Za-z](?:[\w.\[\]-]*[\w\]])?"
_VALUE = r"""[^\s&"'`#<>,;(){}\[\]]+"""
_USERINFO = re.compile(
    r"""(?i)\b(https?://)[^/\s"'`<>?#]+@|(?<![a-z0-9+.-])([a-z][a-z0-9+.-]{0,20}://)[^/\s"'`<>?#:]*:[^/\s"'`<>?#]+@"""
)
_QUERY = re.compile(rf"(?<=[?&;#])({_NAME})=({_VALUE})")
_BARE_QUERY = re.compile(r"""(?<=\?)[^\s"'`#<>&=?]+(?=[\s"'`#<>]|$)""")
_ASSIGNED = re.compile(rf"""(?<![\w.?&;#-])(-{{0,2}}{_NAME})(\s*=\s*)("[^"]*"|'[^']*'|{_VALUE})""")
_ARGUMENT = re.compile(rf"""(?<![\w-])(--{_NAME})(\s+)("[^"]*"|'[^']*'|[^\s-]\S*)""")
_ENTRY = re.compile(rf"""(["'])({_NAME})\1(\s*:\s*)(["'])((?:(?!\4).)+)\4""")
_LISTED = re.compile(rf"""(["'])(--{_NAME})\1(\s*,\s*)(["'])((?:(?!\4).)+)\4""")
_HEADER = re.compile(
    rf"(?i)\b((?:proxy-)?authorization|cookie|(?:x-)?api-key|x-auth-token)(\s*[:=]\s*)((?:bearer|basic|token)\s+)?{_VALUE}"
)
_BEARER = re.compile(r"(?i)\b(bearer|basic)(\s+)(?=\S*\d)[\w.~+/=-]{8,}")
_KNOWN = re.compile(
    r"""\b(?:hf_[A-Za-z0-9]{16,}|sk-(?=[\w-]*\d)[\w-]{16,}|gh[oprsu]_\w{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}|xox[a-z]-[\w-]{10,}
    |A[KS]IA[0-9A-Z]{16}|AIza[\w-]{30,}|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*|nvapi-[\w-]{20,}|gsk_[A-Za-z0-9]{20,})
    |-----BEGIN\ [A-Z ]*PRIVATE\ KEY-----[\s\S]*?(?:-----END\ [A-Z ]*PRIVATE\ KEY-----|$)
    |(?<=hooks\.slack\.com/services/)[\w/]+|(?<=/api/webhooks/)[\w/-]+""",
    re.VERBOSE,
)
"""Forms of the tokens of well-known services."""


def masked(value: Any) -> Any:
    """Return a text, or a mapping or list of anything that JSON has, with ``***`` for every secret in it."""
    if isinstance(value, str):
        return _masked_text(value)
    if isinstance(value, Mapping):
        return {name: _masked_entry(str(name), one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return tuple(_masked_items(value)) if isinstance(value, tuple) else _masked_items(value)
    return value


def place_of_secret(value: Any) -> str | None:
    """Return the dotted place of the first secret in the values of settings; None if there is none."""
    if isinstance(value, Mapping):
        pairs = [(str(name), one, {name: one}) for name, one in value.items()]
    elif isinstance(value, list | tuple):
        pairs = [(str(number), one, one) for number, one in enumerate(value)]
    else:
        return None
    for name, one, alone in pairs:
        if masked(alone) != alone:
            inner = place_of_secret(one)
            return f"{name}.{inner}" if inner else name
    return "" if masked(value) != value else None


def _masked_entry(name: str, value: Any) -> Any:
    words = _words(name)
    if words and words[-1] in _REFERENCES:  # as in `headers_env`, whose own names say nothing about the values
        return {key: masked(one) for key, one in value.items()} if isinstance(value, Mapping) else masked(value)
    return MASK if isinstance(value, str) and _is_secret(words) and _is_literal(value) else masked(value)


def _masked_items(values: Any) -> list[Any]:
    """Return the items of a list; in one of arguments, a value follows its name."""
    found: list[Any] = []
    before = ""
    for value in values:
        named = before.startswith("-") and "=" not in before and _is_secret(_words(before))
        literal = isinstance(value, str) and not value.startswith("-") and _is_literal(value)
        found.append(MASK if named and literal else masked(value))
        before = value if isinstance(value, str) else ""
    return found


def _masked_text(text: str) -> str:
    text = _USERINFO.sub(lambda m: f"{m[1] or m[2]}{MASK}@", text)
    text = _QUERY.sub(lambda m: f"{m[1]}={MASK}" if _is_secret_in_query(m[1], m[2]) else m[0], text)
    text = _BARE_QUERY.sub(lambda m: MASK if _is_random(m[0]) else m[0], text)
    text = _HEADER.sub(lambda m: f"{m[1]}{m[2]}{m[3] or ''}{MASK}", text)
    for pattern in (_ASSIGNED, _ARGUMENT):
        text = pattern.sub(lambda m: f"{m[1]}{m[2]}{MASK}" if _names_secret(m[1], m[3]) else m[0], text)
    for pattern in (_ENTRY, _LISTED):
        text = pattern.sub(
            lambda m: f"{m[1]}{m[2]}{m[1]}{m[3]}{m[4]}{MASK}{m[4]}" if _names_secret(m[2], m[5]) else m[0], text
        )
    text = _BEARER.sub(lambda m: f"{m[1]}{m[2]}{MASK}", text)
    return _KNOWN.sub(MASK, text)


def _names_secret(name: str, value: str) -> bool:
    return _is_secret(_words(name)) and _is_literal(value.strip("\"'"))


def _words(name: str) -> list[str]:
    """Return the words of a name such as ``x-api-key``, ``apiKey`` or ``trainer.hub_token``, in lower case."""
    last = name.rpartition(".")[2]
    return [word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", last)]


def _is_secret(words: list[str]) -> bool:
    """Return whether a name is that of a secret."""
    if not words or words[-1] in _REFERENCES:
        return False
    if any(word.removesuffix("s") in _ALWAYS for word in words):
        return True
    *before, last = words
    if last in ("token", "tokens"):
        return last == "token" if not before else before[-1] in _OF_TOKENS
    return last in ("key", "keys") and bool(before) and before[-1] in _OF_KEYS


def _is_secret_in_query(name: str, value: str) -> bool:
    words = _words(name)
    known = _is_secret(words) or "".join(words) in _IN_QUERIES or (words and words[-1] in ("key", "signature", "token"))
    return value != MASK and (bool(known) or ("".join(words) not in _PUBLIC and _is_random(value)))


def _is_random(value: str) -> bool:
    """Return whether a value looks drawn at random: long, without words, with letters and digits."""
    return bool(re.fullmatch(r"(?=.*\d)(?=.*[A-Za-z])[\w.~+/=%-]{16,}", value))


def _is_literal(value: str) -> bool:
    """Return whether a value is a secret itself: not a name of where it is, a special token, or masked already."""
    return (
        bool(value)
        and not re.match(r"env:|file:(?!//)|\$|<|\[|\*\*\*|…", value)
        and value.lower() not in ("none", "null", "true", "false")
    )
