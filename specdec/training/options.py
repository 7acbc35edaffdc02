"""Options of a training run, as plain data.

Invariant: runs with equal options, data and device give equal weights; only
options in FREE may change when a run is resumed.
"""

import dataclasses

OPTIMIZERS = ("adamw", "muon")
_POSITIVE = ("learning_rate", "clip")
# Options that affect logging and evaluation, not the weights.
FREE = ("log_every", "eval_every", "save_every", "eval_sequences")


@dataclasses.dataclass(frozen=True)
class Options:
  """Options of a training run.

  Attributes:
    steps: number of optimizer updates.
    batch: sequences in one update, over all microbatches.
    sequence: tokens in a sequence.
    accumulate: microbatches in an update; divides `batch`.
    seed: of the initial weights and the order of the data.
    optimizer: 'adamw', or 'muon' (orthogonalised updates of matrices, AdamW for
      the rest; prefers larger batches).
    learning_rate: peak learning rate, reached after `warmup` steps; decays by a
      cosine to final_fraction times the peak.
    warmup: steps of linear warmup.
    final_fraction: last learning rate, as a fraction of the peak.
    adam_b2: decay of Adam's second moments; closer to 1 for smaller batches
      (arXiv:2507.07101).
    weight_decay: decoupled, on matrices only.
    clip: maximum global norm of the gradient.
    dtype: 'float32' or 'bfloat16', of the forward and backward pass; weights
      are stored and updated in float32.
    log_every, eval_every, save_every: steps between log entries, evaluations
      and checkpoints.
    eval_sequences: held-out sequences in one evaluation.
  """

  steps: int
  batch: int
  sequence: int
  accumulate: int = 1
  seed: int = 0
  optimizer: str = "adamw"
  learning_rate: float = 1e-3
  warmup: int = 20
  final_fraction: float = 0.1
  adam_b2: float = 0.99
  weight_decay: float = 0.1
  clip: float = 1.0
  dtype: str = "float32"
  log_every: int = 10
  eval_every: int = 100
  save_every: int = 100
  eval_sequences: int = 64

  def __post_init__(self):
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      minimum = 0 if field.name in ("warmup", "seed") else 1
      if field.type is int and value < minimum:
        raise ValueError(f"{field.name} = {value}; it must be >= {minimum}")
    for name, low, high in (
      ("learning_rate", 0, float("inf")),
      ("final_fraction", 0, 1),
      ("adam_b2", 0, 1),
      ("weight_decay", 0, float("inf")),
      ("clip", 0, float("inf")),
    ):
      value = getattr(self, name)
      if not low <= value <= high or (value == 0 and name in _POSITIVE):
        raise ValueError(f"{name} = {value}; it must be in {low}..{high}")
    if self.batch % self.accumulate:
      raise ValueError(
        f"accumulate = {self.accumulate} does not divide batch = {self.batch}"
      )
    if self.warmup >= self.steps:
      raise ValueError(
        f"warmup = {self.warmup}; it must be < steps = {self.steps}"
      )
    if self.optimizer not in OPTIMIZERS:
      raise ValueError(
        f"optimizer {self.optimizer!r} is unknown; known: "
        f"{', '.join(OPTIMIZERS)}"
      )
    if self.dtype not in ("float32", "bfloat16"):
      raise ValueError(
        f"dtype {self.dtype!r} is unknown; known: float32, bfloat16"
      )
