"""In which types matrices are held."""

import dataclasses
from collections.abc import Callable, Mapping

from specdec.models import quantization
from specdec.utils import calls
from specdec.utils.spelling import choices, naming

BITS = {"float32": 32, "bfloat16": 16, "int8": 8, "int4": 4, "uint4": 4}
STORED = "stored"  # as a checkpoint's file holds each matrix


@dataclasses.dataclass(frozen=True)
class WeightFormat:
  """How a matrix is held; its biases, and norms, have the config's dtype.

  Attributes:
    kind: of BITS; or STORED, a wish that a file turns into others.
    group: consecutive inputs that share a scale; None: all of an output's.
      uint4 has an offset for each scale, other integers have none.
  """

  kind: str
  group: int | None = None

  def __str__(self) -> str:
    return (
      self.kind if self.group is None else f"{self.kind}(group={self.group})"
    )

  @property
  def is_integer(self) -> bool:
    return BITS.get(self.kind, 32) <= 8

  @property
  def weight_size(self) -> float:
    """Bytes of a weight, with its share of a group's float32 scale."""
    return BITS[self.kind] / 8 + (4 / self.group if self.group else 0)

  @property
  def has_offset(self) -> bool:
    return self.kind == "uint4"

  def groups(self, inputs: int) -> int:
    """Returns how many scales an output has.

    Raises:
      ValueError: a group does not divide the inputs.
    """
    group = self.group or inputs
    if inputs % group:
      raise ValueError(
        f"{self}: groups of {group} do not divide {inputs} inputs; "
        f"{quantization.largest_divisor(inputs, group)} do"
      )
    return inputs // group


CALLS: Mapping[str, Callable[..., WeightFormat]] = {
  "float32": lambda: WeightFormat("float32"),
  "bfloat16": lambda: WeightFormat("bfloat16"),
  "int8": lambda group=None: WeightFormat("int8", group),
  "int4": lambda group=32: WeightFormat("int4", group),
  STORED: lambda: WeightFormat(STORED),
}


def parse(text: str | None) -> WeightFormat | None:
  """Reads the call that says how matrices are held; None: in dtype.

  Raises:
    ValueError: it is of another form.
  """
  if text is None:
    return None
  with naming(f"weights = {text!r}"):
    call = calls.parse(str(text))
  if call.place is not None or call.name not in CALLS:
    raise ValueError(f"weights = {text}; {choices(call.name, CALLS)}")
  form = calls.invoke(call, CALLS[call.name], {})
  group = form.group
  if group is not None and (type(group) is not int or group < 1):
    raise ValueError(
      f"weights = {text}: group={group!r}; it must be an integer >= 1"
    )
  return form
