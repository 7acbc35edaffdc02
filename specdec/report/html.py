"""Renders HTML pages from the templates of this folder.

Invariant: a page is one file that makes no network request (its content
security policy forbids them), and every value in it is spelled out and escaped.
"""

import base64
import hashlib

import jinja2
from markupsafe import Markup

from specdec.utils.terminal import is_unsafe


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
  return "".join(x if x in keep else _spelled(x) for x in text)


def escape(text: str) -> Markup:
  """Escapes text in which newlines and tabs are kept."""
  return Markup.escape(spell(text, "\n\t"))


def _spelled(character: str) -> str:
  code = ord(character)
  if character == "\n":
    return "↵"
  if code < 0x20 or code == 0x7F:
    return chr(0x2421 if code == 0x7F else 0x2400 + code)
  return f"[U+{code:04X}]" if is_unsafe(character) else character


def _digest(script: str) -> str:
  """Returns the hash by which a content security policy admits a script."""
  digest = hashlib.sha256(script.encode()).digest()
  return f"sha256-{base64.b64encode(digest).decode()}"
