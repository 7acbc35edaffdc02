"""How rotary frequencies are scaled beyond the context of pre-training."""

import dataclasses

from specdec.models.checks import check_counts, check_positive
from specdec.utils.spelling import check_choice


@dataclasses.dataclass(frozen=True)
class RopeScaling:
  """Scaling of rotary frequencies beyond the trained context.

  Kind 'linear' divides all frequencies by `factor`. Kind 'llama3' (Llama 3.1)
  divides those of wavelengths above original_length / low_frequency_factor,
  leaves those below original_length / high_frequency_factor unchanged, and
  interpolates between them; original_length is the context of pre-training.
  """

  kind: str
  factor: float
  low_frequency_factor: float = 1.0
  high_frequency_factor: float = 4.0
  original_length: int = 8192

  def __post_init__(self):
    check_choice("rope scaling kind", self.kind, ("linear", "llama3"))
    check_positive(
      self, "factor", "low_frequency_factor", "high_frequency_factor"
    )
    check_counts(self, "original_length")
    low, high = self.low_frequency_factor, self.high_frequency_factor
    if self.kind == "llama3" and low >= high:
      raise ValueError(
        f"low_frequency_factor = {low} must be < high_frequency_factor = {high}"
      )
