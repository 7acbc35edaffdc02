"""Where files hold the tensors of names.py: under other names."""

import re
from collections.abc import Iterable

from specdec.checkpoints.architectures import WITH_IMAGES

# Of a model that also sees images: what it sees them with, and the beginnings
# of the text model's names, as files before and since transformers 4.52 have
# them.
_IMAGES = re.compile(r"(model\.)?(vision_tower|multi_modal_projector)\..*")
_TEXT = {
  "language_model.model.": "model.",
  "language_model.lm_head.": "lm_head.",
  "model.language_model.": "model.",
}


def text_names(
  names: Iterable[str], architectures: Iterable[str]
) -> dict[str, str]:
  """Returns name in names.py -> name in the file, without what sees images."""
  if WITH_IMAGES.keys().isdisjoint(architectures):
    return {name: name for name in names}
  found = {}
  for stored in names:
    if _IMAGES.fullmatch(stored):
      continue
    name = stored
    for prefix, ours in _TEXT.items():
      if stored.startswith(prefix):
        name = ours + stored.removeprefix(prefix)
    found[name] = stored
  return found
