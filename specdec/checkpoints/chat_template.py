"""Renders chat templates in a subprocess with time and memory limits.

A template is untrusted code from the checkpoint. Jinja's sandbox bars it from
files and attributes; the subprocess bounds its memory and time. It runs this
file as a script, which answers one line of JSON for each conversation.
"""

import atexit
import functools
import json
import select
import subprocess
import sys
from collections.abc import Mapping, Sequence

_SECONDS = 5.0  # for one conversation
_MEMORY = 512 << 20  # bytes of address space, including the interpreter


class Renderer:
  """The subprocess that renders templates, started at first use."""

  def __init__(self):
    self._process: subprocess.Popen | None = None

  def render(
    self,
    template: str,
    messages: Sequence[Mapping[str, str]],
    special: Mapping[str, str],
  ) -> str:
    """Returns the text of messages {'role': ..., 'content': ...}.

    Raises ValueError where the template is invalid, rejects the messages, or
    takes more than five seconds or 512 MiB.
    """
    values = dict(special, messages=list(messages), add_generation_prompt=True)
    values |= {"tools": None, "documents": None}  # as in transformers
    try:
      process = self._process or self._start()
      process.stdin.write(json.dumps([template, values]) + "\n")
      process.stdin.flush()
      ready, _, _ = select.select([process.stdout], [], [], _SECONDS)
      answer = process.stdout.readline() if ready else None
    except BrokenPipeError:
      answer = ""
    except BaseException:  # its answer would be taken for the next one's
      self._stop()
      raise
    if answer is None or not answer.endswith("\n"):
      self._stop()
      reason = "it ended its process"
      if answer is None:
        reason = f"it ran for more than {_SECONDS:g} s"
      raise ValueError(f"the chat template failed: {reason}")
    text, error = json.loads(answer)
    if error:
      raise ValueError(f"the chat template failed: {error}")
    return text

  def _start(self) -> subprocess.Popen:
    """Returns the process once it waits for templates: the limit is theirs."""
    self._process = subprocess.Popen(
      [sys.executable, "-P", __file__],  # -P: no imports from this folder
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      stderr=subprocess.DEVNULL,
      text=True,
      encoding="utf-8",
    )
    atexit.register(self._stop)
    self._process.stdout.readline()
    return self._process

  def _stop(self) -> None:
    if self._process is not None:
      atexit.unregister(self._stop)
      self._process.kill()
      self._process.communicate()
      self._process = None


def _serve() -> None:
  """Says that it is ready, and answers every line of standard input."""
  import resource
  import time

  import jinja2
  import jinja2.ext
  from jinja2.sandbox import ImmutableSandboxedEnvironment

  class Generation(jinja2.ext.Extension):
    """{% generation %} marks what an assistant says, for training: its body."""

    tags = frozenset({"generation"})

    def parse(self, parser):
      next(parser.stream)
      return parser.parse_statements(["name:endgeneration"], drop_needle=True)

  # Jinja's filter of this name escapes <, > and & for HTML; the parameters are
  # those of transformers'.
  def to_json(
    value, ensure_ascii=False, indent=None, separators=None, sort_keys=False
  ) -> str:
    return json.dumps(
      value,
      ensure_ascii=ensure_ascii,
      indent=indent,
      separators=separators,
      sort_keys=sort_keys,
    )

  def raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)

  environment = ImmutableSandboxedEnvironment(
    trim_blocks=True,
    lstrip_blocks=True,
    extensions=["jinja2.ext.loopcontrols", Generation],
  )
  environment.filters["tojson"] = to_json
  environment.globals["raise_exception"] = raise_exception
  environment.globals["strftime_now"] = time.strftime
  compiled = functools.cache(environment.from_string)
  resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
  print(flush=True)
  for line in sys.stdin:
    source, values = json.loads(line)
    try:
      answer = compiled(source).render(**values), None
    except Exception as error:  # a template can raise anything
      answer = None, str(error) or type(error).__name__
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
  _serve()
