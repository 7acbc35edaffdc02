"""What a format says of a drafter in it, before its weights are read."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from specdec.checkpoints.formats.files import Files
from specdec.drafters.heads.head_config import HeadConfig

_REQUIRED = object()


class Target(NamedTuple):
  """What formats say of, or need to know of, a drafter's target."""

  num_layers: int
  width: int
  vocab_size: int
  name: str = ""  # by which an engine finds it
  architectures: tuple[str, ...] = ()
  max_length: int | None = None  # positions that it was made for
  logit_softcap: float | None = None  # of its TransformerConfig, and
  scale_embedding: bool = False


class Stored(NamedTuple):
  """A drafter in some format.

  Attributes:
    head_config: of the drafter.
    table: path in its parameters -> tensor name.
    vocab_size: V of the target that it is for; None: not said.
    verifier: name of that target; None: not said.
    target_width: of that target; None: as the drafter's.
    prefix: with which the names of the drafter's tensors begin.
    ignored: regular expression of tensors that may be there and are not read.
    files: in the place of those that were opened: with the names of `table`.
  """

  head_config: HeadConfig
  table: dict[str, str]
  vocab_size: int | None = None
  verifier: str | None = None
  target_width: int | None = None
  prefix: str = ""
  ignored: str | None = None
  files: Files | None = None


def typed(
  config: Mapping[str, Any],
  key: str,
  kind: type,
  source: str,
  default: Any = _REQUIRED,
) -> Any:
  """Returns an entry of a config, or its default where it is absent or null.

  Raises:
    ValueError: it is of another type, or absent without a default.
  """
  value = config.get(key)
  if value is None and default is not _REQUIRED:
    return default
  if type(value) is not kind:
    raise ValueError(
      f"{source} has {key} = {value!r:.60}; it must be of type {kind.__name__}"
    )
  return value


def layer_ids(
  value: Any,
  source: str,
  low: int = 0,
  key: str = "eagle_aux_hidden_state_layer_ids",
) -> tuple[int, ...]:
  """Returns the target's layers that a config lists under `key`.

  Raises:
    ValueError: they are no list of integers >= low.
  """
  if not isinstance(value, list) or not all(
    type(x) is int and x >= low for x in value
  ):
    raise ValueError(
      f"{source} has {key} = {value!r:.60}; they must be a list of integers >= "
      f"{low}"
    )
  return tuple(value)
