"""Loads a target and a draft model and checks that they share a vocabulary.

Invariant: vocabulary sizes are compared before any weight is loaded.
"""

from specdec.checkpoints import loading
from specdec.checkpoints.tokenizer import Tokenizer, same_vocabulary
from specdec.sharding import Placement


def load_pair(
  target: str,
  draft: str | None,
  dtype: str = "float32",
  places: tuple[Placement | None, Placement | None] = (None, None),
) -> tuple[loading.Checkpoint, loading.Checkpoint | None]:
  """Loads the checkpoints of target and draft.

  Args:
    target, draft: sources as for `loading.load`; draft None: only the target.
    dtype: of both models' parameters.
    places: placements of target and draft on a mesh.

  Raises:
    ValueError: their vocabularies differ; or as `loading.load`.
    FileNotFoundError: as `loading.load`.
  """
  if draft is None:
    return loading.load(target, dtype, places[0]), None
  sizes = [loading.inspect(name, dtype).vocab_size for name in (target, draft)]
  check_vocabulary(*sizes)
  models = [
    loading.load(name, dtype, place)
    for name, place in zip((target, draft), places)
  ]
  check_vocabulary(*sizes, *(model.tokenizer for model in models))
  return models[0], models[1]


def check_vocabulary(
  target_size: int,
  draft_size: int,
  target: Tokenizer | None = None,
  draft: Tokenizer | None = None,
) -> None:
  """Compares vocabulary sizes and, if both tokenizers are given, the tokens.

  Raises:
    ValueError: they differ.
  """
  if target_size != draft_size:
    raise ValueError(
      f"the target has {target_size} token ids and the draft {draft_size}; "
      "they must share one vocabulary"
    )
  if target is None or draft is None:
    return
  difference = same_vocabulary(target, draft)
  if difference:
    raise ValueError(
      f"target and draft have different vocabularies: {difference}"
    )
