"""Checks that a target and a draft model share a vocabulary."""

from specdec.checkpoints.tokenizer import Tokenizer, same_vocabulary


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
