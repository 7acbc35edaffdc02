"""What defines a training run, as plain data.

Invariant: two runs with equal options, data and device give the same weights;
what may change in the middle of a run is listed in FREE.
"""

import dataclasses

OPTIMIZERS = ("adamw", "muon")
_POSITIVE = ("learning_rate", "clip")
# What says how a run is watched, not what it computes.
FREE = ("log_every", "eval_every", "save_every", "eval_sequences")


@dataclasses.dataclass(frozen=True)
class Options:
  """One run.

  Attributes:
    steps: optimizer updates.
    batch: sequences of one update, all of its pieces together.
    sequence: tokens of a sequence.
    accumulate: pieces that a batch is computed in; divides `batch`.
    seed: of the first weights and the order of the data.
    optimizer: 'adamw', or 'muon' (matrices orthogonalised, the rest by AdamW;
      it wants larger batches and fewer of them).
    learning_rate: the highest, reached after `warmup` steps; falls by a cosine
      to final_fraction of itself at the last step.
    warmup: steps of linear rise.
    final_fraction: see learning_rate.
    adam_b2: decay of Adam's second moments; the smaller the batch, the nearer
      to 1 (arXiv:2507.07101).
    weight_decay: decoupled, on matrices only.
    clip: largest norm of the whole gradient.
    dtype: 'float32' or 'bfloat16', of the products; weights are kept and
      updated in float32 whatever it says.
    log_every, eval_every, save_every: steps between lines of the log,
      evaluations and checkpoints.
    eval_sequences: held-out sequences of one evaluation.
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
      least = 0 if field.name in ("warmup", "seed") else 1
      if field.type is int and value < least:
        raise ValueError(f"{field.name} = {value}; it must be >= {least}")
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
      raise ValueError(f"warmup = {self.warmup}; it must be < {self.steps}")
    if self.optimizer not in OPTIMIZERS:
      raise ValueError(
        f"optimizer {self.optimizer!r} is unknown; known: "
        f"{', '.join(OPTIMIZERS)}"
      )
    if self.dtype not in ("float32", "bfloat16"):
      raise ValueError(
        f"dtype {self.dtype!r} is unknown; known: float32, bfloat16"
      )
