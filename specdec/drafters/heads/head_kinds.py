"""The kinds of trained heads, and what the heads of each have in common."""

from typing import NamedTuple

HEADS = ("own", "shared")  # and embeddings


class Kind(NamedTuple):
  """What the heads of a kind have in common.

  Attributes:
    num_layers: of its own that it needs at least; None: it has none.
    by_level: it has a head or a slot for each level, and can draft no more.
    heads: those of HEADS that it may have.
    reads_features: it reads streams entering layers of the target.
    exits: it runs the target's first layers.
    resets: its KV cache is empty at the start of every round.
    predicts_hidden: it predicts the target's hidden states.
    parallel: it drafts all levels in one pass, with masks for tokens that are
      not drawn yet.
    own_hidden: its hidden states have its own width, unlike what it is encoded
      from the target's.
    published: options of the published layout that it has; None: it has only
      the compact one.
    compact: it has a compact layout.
  """

  num_layers: int | None = 1
  by_level: bool = False
  heads: tuple[str, ...] = HEADS
  reads_features: bool = False
  exits: bool = False
  resets: bool = False
  predicts_hidden: bool = False
  own_hidden: bool = False
  parallel: bool = False
  published: tuple[str, ...] | None = None
  compact: bool = True


_LAYER_OPTIONS = "embed", "qkv_bias", "qk_norm", "rope_scaling"
_EAGLE3 = (
  *("feature_norm", "norm_before_residual", "feeds_back_norm"),
  *_LAYER_OPTIONS,
)
KINDS = {
  "block": Kind(
    by_level=True,
    reads_features=True,
    published=("embed", "rope_scaling"),
  ),
  "eagle": Kind(
    heads=("shared",),
    predicts_hidden=True,
    published=("bias", *_LAYER_OPTIONS),
  ),
  "eagle3": Kind(reads_features=True, published=_EAGLE3),
  "exit": Kind(num_layers=0, exits=True),
  "hydra": Kind(num_layers=None, by_level=True),
  "medusa": Kind(
    num_layers=None, by_level=True, published=("residual_layers",)
  ),
  "mlp_speculator": Kind(
    num_layers=None,
    by_level=True,
    heads=("own",),
    own_hidden=True,
    published=("scale_input", "tied"),
    compact=False,
  ),
  "mtp": Kind(
    published=(
      *("feeds_back_norm", "hidden_first", "norm_offset", "layer"),
      *_LAYER_OPTIONS,
    ),
  ),
  "peagle": Kind(reads_features=True, parallel=True, published=_EAGLE3),
  "prophet": Kind(resets=True, own_hidden=True),
  "redrafter": Kind(
    num_layers=None,
    heads=("own",),
    published=("residual_layers", "rnn"),
    compact=False,
  ),
}
