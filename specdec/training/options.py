"""Options of a training run, as plain data.

Invariant: runs with equal options, data and device give equal weights; only
options in FREE may change when a run is resumed.
"""

import dataclasses
import math

from specdec.models.config import TransformerConfig
from specdec.utils.spelling import check_choice

OPTIMIZERS = ("adamw", "muon")
# Options of when something is logged, evaluated or kept.
FREE = ("log_every", "eval_every", "save_every", "profile")


@dataclasses.dataclass(frozen=True)
class Options:
  """Options of a training run."""

  steps: int  # optimizer updates
  batch: int  # sequences in one update, over all microbatches
  sequence: int  # tokens in a sequence; of an encoder-decoder in a text
  source: int = 0  # tokens of what an encoder-decoder reads, in a sequence
  accumulate: int = 1  # microbatches in an update; divides `batch`
  seed: int = 0  # of the initial weights and the order of the data
  # 'adamw', or 'muon': orthogonalised updates of linear maps, AdamW for tables
  # and the rest; it prefers larger batches.
  optimizer: str = "adamw"
  learning_rate: float = 1e-3  # the peak; decays by a cosine
  warmup: int = 20  # steps of linear warmup
  final_fraction: float = 0.1  # last learning rate, as a fraction of the peak
  # Decay of second moments; closer to 1 for smaller batches (arXiv:2507.07101).
  adam_b2: float = 0.99
  # Decoupled; on matrices only, and with Muon on maps between hidden states.
  weight_decay: float = 0.1
  clip: float = 1.0  # maximum global norm of the gradient
  # 'float32' or 'bfloat16', of the forward and backward pass; weights are
  # stored and updated in float32.
  dtype: str = "float32"
  log_every: int = 10  # steps between log entries
  eval_every: int = 100  # ... evaluations
  save_every: int = 100  # ... checkpoints
  eval_sequences: int = 64  # held-out sequences in one evaluation
  profile: str | None = None  # folder for a profiler's trace of five steps

  def __post_init__(self):
    for field in dataclasses.fields(self):
      if field.type is int:
        least = 0 if field.name in ("source", "warmup", "seed") else 1
        check_range(self, field.name, least)
    for name in ("learning_rate", "clip"):
      check_range(self, name, 0, above=True)
    check_range(self, "weight_decay", 0)
    check_range(self, "final_fraction", 0, 1)
    check_range(self, "adam_b2", 0, 1)
    if self.batch % self.accumulate:
      raise ValueError(
        f"accumulate = {self.accumulate} does not divide batch = {self.batch}"
      )
    if self.warmup >= self.steps:
      raise ValueError(
        f"options.warmup = {self.warmup}; it must be < options.steps = "
        f"{self.steps}"
      )
    check_choice("optimizer", self.optimizer, OPTIMIZERS)
    check_choice("dtype", self.dtype, ("float32", "bfloat16"))

  def in_dtype(self, config: TransformerConfig) -> TransformerConfig:
    """Returns the config of a model whose forward pass is in `dtype`."""
    return dataclasses.replace(config, dtype=self.dtype)


def check_range(
  settings: object,
  name: str,
  low: float,
  high: float = math.inf,
  *,
  above: bool = False,
  prefix: str = "",
) -> None:
  """Raises ValueError unless low <= settings.name <= high, and it is finite.

  Args:
    above: also refuses `low` itself.
    prefix: of the name, in the message.
  """
  value = getattr(settings, name)
  is_above = value > low if above else value >= low
  if is_above and value <= high and math.isfinite(value):
    return
  limits = f"{'>' if above else '>='} {low}"
  if value == math.inf:
    limits += ", and finite"
  if high < math.inf:
    limits = f"in {low}..{high}"
  raise ValueError(f"{prefix}{name} = {value}; it must be {limits}")
