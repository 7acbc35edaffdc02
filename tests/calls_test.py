"""Drafters, rules and shapes are named by calls; nothing is evaluated."""

from collections.abc import Sequence

import pytest

from specdec.utils import calls
from specdec.utils.calls import Call


@pytest.mark.parametrize(
  "text, expected",
  [
    ("lookup", Call(None, "lookup")),
    ("lookup()", Call(None, "lookup")),
    ("model(stdlib-1m)", Call(None, "model", ("stdlib-1m",))),
    ("layer_skip(attention=[1,3], mlp=[2])",
     Call(None, "layer_skip", (), {"attention": [1, 3], "mlp": [2]})),
    ("eagle3(runs/x/best.st)", Call(None, "eagle3", ("runs/x/best.st",))),
    ("model('a, b)')", Call(None, "model", ("a, b)",))),
    ("mine.py:bigram(text=x.txt)",
     Call("mine.py", "bigram", (), {"text": "x.txt"})),
    ("my_package.rules:nucleus(mass=0.8)",
     Call("my_package.rules", "nucleus", (), {"mass": 0.8})),
    ("head('/home/o\\'brien/x', name=\"a 'b'\", to='[x')",
     Call(None, "head", ("/home/o'brien/x",), {"name": "a 'b'", "to": "[x"})),
    ("f('\\\\', '\\\\\\'')", Call(None, "f", ("\\", "\\'"))),
    ("f(None, True, -1)", Call(None, "f", (None, True, -1))),
    ("f(__import__('os').system('x'))",
     Call(None, "f", ("__import__('os').system('x')",))),
  ],
)  # fmt: skip
def test_a_call_is_read_and_written_again(text, expected):
  assert calls.parse(text) == expected
  assert calls.parse(str(expected)) == expected


def test_several_stand_between_bars():
  first, second = calls.parse_all("lookup(k=4) | eagle3('a|b')")
  assert first == Call(None, "lookup", (), {"k": 4})
  assert second == Call(None, "eagle3", ("a|b",))


@pytest.mark.parametrize(
  "text, complaint",
  [
    ("", "is not a call"),
    ("a b", "is not a call"),
    ("f(1", "is not a call"),
    ("f([1)", "not closed"),
    ("f(1))", "not closed"),
    ("f(x=1, 2)", "no argument can"),
    ("f(,)", "no argument can"),
    ("f(x=1, x=2)", "gives x twice"),
  ],
)
def test_what_is_no_call_is_refused(text, complaint):
  with pytest.raises(ValueError, match=complaint):
    calls.parse(text)


def test_functions_are_found_in_files_and_modules(tmp_path):
  file = tmp_path / "mine.py"
  file.write_text("count = 0\ndef double(x, scale=2):\n  return scale * x\n")
  call = calls.parse(f"{file}:double(3)")
  function = calls.find(call, {}, "drafter")
  assert calls.invoke(call, function, {"scale": 5, "other": 1}) == 15
  call = calls.parse(f"{file}:double(3, scale=1)")
  assert calls.find(call, {}, "drafter") is function  # imported once
  assert calls.invoke(call, function, {"other": 5}) == 3
  with pytest.raises(ValueError, match="scale is not an argument of a call"):
    calls.invoke(call, function, {"scale": 5})
  assert calls.find(calls.parse("math:sqrt"), {}, "drafter")(4) == 2
  for text, complaint in (
    (f"{file}:dubble", "did you mean 'double'|double"),
    (f"{tmp_path}/no.py:f", "there is no file"),
    ("no_such_module:f", "there is no module"),
    ("nonsense", "known|lookup"),
  ):
    with pytest.raises(ValueError, match=complaint):
      calls.find(calls.parse(text), {"lookup": len}, "drafter")
  for text in (f"{file}:double()", f"{file}:double(1, 2, 3)",
               f"{file}:double(1, y=2)"):  # fmt: skip
    with pytest.raises(ValueError, match=r"it is double\(x"):
      calls.invoke(calls.parse(text), function, {})


@pytest.mark.parametrize(
  "text, complaint",
  [
    ("f(1.5)", r"f\(1.5\): count = 1.5; it must be an integer below 2\*\*31$"),
    ("f(True)", "count = True; it must be an int"),
    ("f(1, share=nan)", "share = 'nan'; it must be a number or None"),
    ("f(1, rows=[1, 2.5])", r"rows = \[1, 2.5\]; it must be a list"),
    ("f(1, rows=3)", "rows = 3; it must be a list"),
    ("f(1, file='')", "file is empty"),
    ("f(1, file=[])", r"file = \[\]; it must be a text"),
    ("f(1, file=gone)", "f.1, file=gone.: No such file or directory: gone"),
  ],
)
def test_arguments_are_of_the_types_that_a_function_says(text, complaint):
  def f(
    count: int,
    share: float | None = None,
    rows: Sequence[int] = (),
    file: str = "5",
  ):
    return open(file) if file == "gone" else (count, share, rows, file)

  with pytest.raises(ValueError, match=complaint):
    calls.invoke(calls.parse(text), f, {})
  good = calls.parse("f(2, 1, [3], 4)")
  assert calls.invoke(good, f, {}) == (2, 1, [3], "4")
