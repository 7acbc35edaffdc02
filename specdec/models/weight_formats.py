"""In which types matrices are held."""

import dataclasses

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
  def has_offset(self) -> bool:
    return self.kind == "uint4"

  def groups(self, inputs: int) -> int:
    """Returns how many scales an output has.

    Raises:
      ValueError: a group does not divide the inputs.
    """
    group = self.group or inputs
    if inputs % group:
      divisors = [n for n in range(1, group) if inputs % n == 0]
      raise ValueError(
        f"{self}: groups of {group} do not divide {inputs} inputs; "
        f"{divisors[-1]} do"
      )
    return inputs // group
