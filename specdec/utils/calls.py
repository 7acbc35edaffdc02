"""Calls written as text: how drafters, rules and shapes are named.

  lookup    early_exit(3)    typical(epsilon=0.09)    eagle3(runs/x/best.st)
  mine.py:bigram(text=x.txt)    my_package.rules:nucleus(mass=0.8)

Arguments are Python literals; anything else is a string as it stands, and none
is evaluated. A file or a module that a call names is imported, which runs it,
and its function is called: take calls from whom you would take code.
"""

import ast
import importlib
import importlib.util
import inspect
import pathlib
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from specdec.utils import kinds
from specdec.utils.spelling import choices

_CALL = re.compile(
  r"\s*(?:(?P<place>[^\s():|]+):)?(?P<name>\w+)\s*(?:\((?P<args>.*)\))?\s*",
  re.DOTALL,
)
_QUOTED = re.compile(r"[\s,()=|'\"\[\]{}]")  # a string with one is quoted
_USER = "specdec_user_"  # begins the names of modules that are users' files
_OPEN_CONTEXT = ("siblings",)  # of a context, what a call may pass itself


class Call(NamedTuple):
  """A name with arguments, not called yet."""

  place: str | None  # a .py file or a module; None: one of ours
  name: str
  args: tuple = ()
  kwargs: Mapping[str, Any] = {}

  def __str__(self) -> str:
    args = [*map(_written, self.args)]
    args += [f"{key}={_written(value)}" for key, value in self.kwargs.items()]
    place = f"{self.place}:" if self.place else ""
    return f"{place}{self.name}" + (f"({', '.join(args)})" if args else "")


def _written(value) -> str:
  """Writes a value so that it is read back as the same."""
  bare = isinstance(value, str) and value and not _QUOTED.search(value)
  if bare and _literal(value) is value:
    return value
  return repr(value)


def _literal(text: str):
  """Reads a Python literal; any other text is returned itself."""
  try:
    return ast.literal_eval(text)
  except (ValueError, SyntaxError, MemoryError, RecursionError):
    return text


def split(text: str, separator: str) -> Iterator[str]:
  """Splits at separators outside brackets and quotes.

  Raises ValueError where these are not closed.
  """
  depth, quote, begin, escaped = 0, "", 0, False
  for i, character in enumerate(text):
    if quote:
      ends = character == quote and not escaped
      quote = "" if ends else quote
      escaped = character == "\\" and not escaped
    elif character in "'\"":
      quote = character
    elif character in "([{":
      depth += 1
    elif character in ")]}":
      depth -= 1
    elif character == separator and depth == 0:
      yield text[begin:i]
      begin = i + 1
    if depth < 0:
      break
  if depth or quote:
    raise ValueError(f"{text!r}: brackets or quotes are not closed")
  yield text[begin:]


def parse(text: str) -> Call:
  """Reads one call; raises ValueError that says how one is written."""
  match = _CALL.fullmatch(text)
  if match is None:
    raise ValueError(
      f"{text!r} is not a call; write name, name(1, key=2) or "
      "file.py:name(key=value)"
    )
  args, kwargs = [], {}
  inside = match["args"]
  for part in split(inside, ",") if inside and inside.strip() else ():
    key, equals, value = part.partition("=")
    if equals and key.strip().isidentifier():
      if key.strip() in kwargs:
        raise ValueError(f"{text!r} gives {key.strip()} twice")
      kwargs[key.strip()] = _literal(value.strip())
    elif kwargs or not part.strip():
      raise ValueError(
        f"{text!r}: {part.strip()!r} stands where no argument can"
      )
    else:
      args.append(_literal(part.strip()))
  return Call(match["place"], match["name"], tuple(args), kwargs)


def parse_all(text: str) -> list[Call]:
  """Reads calls with | between them."""
  return [parse(part) for part in split(text, "|")]


def find(call: Call, ours: Mapping[str, Callable], what: str) -> Callable:
  """Returns the function that a call names, of `ours` or of a file or module.

  Args:
    what: they are, for the error.

  Raises ValueError that lists the valid names.
  """
  if call.place is None:
    if call.name not in ours:
      raise ValueError(
        f"no {what} {call.name}; {choices(call.name, sorted(ours))}, or one of "
        "your own: file.py:name"
      )
    return ours[call.name]
  module = _module(call.place)
  function = getattr(module, call.name, None)
  if not callable(function):
    public = [
      name
      for name, x in vars(module).items()
      if inspect.isfunction(x) and x.__module__ == module.__name__
    ]
    raise ValueError(
      f"{call.place} has no function {call.name}; "
      f"{choices(call.name, sorted(public))}"
    )
  return function


def user_line(error: BaseException) -> str:
  """Returns ' (FILE:LINE)' where an error passed through a user's file."""
  frames = traceback.extract_tb(error.__traceback__)
  files = {
    module.__file__
    for name, module in sys.modules.items()
    if name.startswith(_USER)
  }
  lines = [f" ({x.filename}:{x.lineno})" for x in frames if x.filename in files]
  return lines[-1] if lines else ""


def _module(place: str):
  """Imports a file, once, or a module."""
  if not place.endswith(".py"):
    try:
      return importlib.import_module(place)
    except ModuleNotFoundError as error:
      raise ValueError(f"there is no module {place} ({error})") from error
  path = pathlib.Path(place).expanduser().resolve()
  if not path.is_file():
    raise ValueError(f"there is no file {place}")
  name = f"{_USER}{abs(hash(str(path)))}_{path.stem}"
  if name not in sys.modules:
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
      spec.loader.exec_module(module)
    except BaseException:
      del sys.modules[name]
      raise
  return sys.modules[name]


def bind(
  call: Call, function: Callable, context: Mapping[str, Any]
) -> inspect.BoundArguments:
  """Binds a call's arguments, and the parameters it leaves to the context.

  Raises ValueError with the signature where the arguments do not fit, and for
  one of a wrong type of one of our functions.
  """
  signature = inspect.signature(function)
  for name in context:
    if name in call.kwargs and name not in _OPEN_CONTEXT:
      raise ValueError(f"{call}: {name} is not an argument of a call")
  passed = {
    name: value
    for name, value in context.items()
    if name in signature.parameters and name not in call.kwargs
  }
  left = signature.replace(
    parameters=[p for n, p in signature.parameters.items() if n not in passed],
    return_annotation=inspect.Signature.empty,
  )
  try:
    bound = left.bind(*call.args, **call.kwargs)
  except (TypeError, ValueError) as error:
    raise ValueError(f"{call}: {error}; it is {call.name}{left}") from error
  if call.place is None:
    for name, value in bound.arguments.items():
      kind = signature.parameters[name].annotation
      if kind is signature.empty:
        continue
      if kind is str and type(value) in (int, float):  # a name like 5
        value = bound.arguments[name] = str(value)
      if value == "":
        raise ValueError(f"{call}: {name} is empty")
      kinds.check(f"{call}: {name}", value, kind)
  complete = signature.bind_partial(**passed)
  complete.arguments |= bound.arguments
  return complete


def invoke(call: Call, function: Callable, context: Mapping[str, Any]):
  """Calls a function with what `bind` returns.

  Raises ValueError as `bind`, and where one of our functions cannot read a
  file, or cannot take a member of a list. What a user's function raises is left
  as it is.
  """
  bound = bind(call, function, context)
  try:
    return function(*bound.args, **bound.kwargs)
  except (TypeError, OSError) as error:
    if call.place is not None:
      raise
    if isinstance(error, OSError) and error.strerror:
      error = f"{error.strerror}: {error.filename}"
    raise ValueError(f"{call}: {error}") from None
