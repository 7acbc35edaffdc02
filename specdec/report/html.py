"""Renders HTML pages from the templates of this folder.

Invariant: a page is one file that makes no network request (its content
security policy forbids them), and every value in it is spelled out and escaped.
"""

import base64
import hashlib

import jinja2
from markupsafe import Markup

from specdec.utils.terminal import is_unsafe

_SIGNS = {chr(code): chr(0x2400 + code) for code in range(0x20)}
_SIGNS |= {"\n": "↵", "\x7f": "␡"}


def render(template: str, **values) -> str:
  """Renders a template; values that are not Markup are escaped."""
  environment = jinja2.Environment(
    loader=jinja2.PackageLoader("specdec", "report"),
    autoescape=True,
    finalize=lambda x: x if isinstance(x, Markup) else spell(str(x)),
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
  )
  environment.filters |= {"digest": _digest, "text": escape}
  return environment.get_template(template).render(**values)


def spell(text: str, keep: str = "") -> str:
  """Spells out characters that are invisible or unsafe, except those in `keep`.

  These are control characters, directional overrides and lone surrogates.
  """
  return "".join(x if x in keep else _SIGNS.get(x) or _code(x) for x in text)


def escape(text: str) -> Markup:
  """Escapes text in which newlines and tabs are kept."""
  return Markup.escape(spell(text, "\n\t"))


def _code(character: str) -> str:
  return f"[U+{ord(character):04X}]" if is_unsafe(character) else character


def _digest(script: str) -> str:
  """Returns the hash by which a content security policy admits a script."""
  digest = hashlib.sha256(script.encode()).digest()
  return f"sha256-{base64.b64encode(digest).decode()}"
