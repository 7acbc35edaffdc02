"""Target and draft as one: they exchange token ids, so ids must mean the same.

Invariant: nothing is loaded before sizes were compared.
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
  """Both checkpoints; arguments as of `load`, draft None for none.

  Args:
    places: of target and draft.

  Raises:
    ValueError: their vocabularies differ; or as `load`.
    FileNotFoundError: as `load`.
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
  """Compares sizes, and strings where both bring a tokenizer.

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
    raise ValueError(f"target and draft have unlike vocabularies: {difference}")
