"""The configuration of a block drafter, beyond that of every head."""

import dataclasses
import typing

from specdec.utils.spelling import check_choice

SLOTS = ("in_place", "next")
SUCCESSORS = ("none", "markov", "gated_markov", "rnn_markov", "gru", "selector")


@dataclasses.dataclass(frozen=True)
class BlockConfig:
  """How a block of draft tokens is written in one pass.

  Attributes:
    causal: a slot sees the slots before it (JetSpec, arXiv:2606.18394), not
      all of the block (DFlash, arXiv:2602.06036).
    slots: 'in_place', slot j stands for the token at anchor + j and slot 0, the
      anchor's own, is not used (DFlash); or 'next', slot j predicts the token
      at anchor + j + 1 (DSpark, arXiv:2607.05147).
    successor: what is added to a slot's logits given the draft token before it:
      'markov', W2 W1[token]; 'gated_markov', W2 (gate W1[token]);
      'rnn_markov', with a state over the block (all DSpark); 'gru', of the
      slot's hidden state and a GRU over the draft's tokens (Domino,
      arXiv:2605.29707), from the second draft token on; 'selector', a bilinear
      term, and only the slot's likeliest tokens can be drawn (DFlash2,
      github.com/z-lab/dflash); or 'none'.
    rank: of W1 and W2, of the GRU's vocabulary projection, or of the selector.
    candidates: of the selector: how many tokens a slot's distribution has.
    taps: of grouped causal convolutions over the slots, before and after
      attention and MLP of every layer (DFlash2 has 2); 0: there are none.
    group: channels that share the part of a convolution's kernel that depends
      on the slot.
    state: size of the GRU's state; 0: the head's width.
    window: positions of context that a slot sees, its own included; 0: all.
    full_layers: layers, from 0, that see all of the context despite `window`.
    causal_window: the layers with a window are causal in the block, whatever
      `causal` says of the others (z-lab's drafters of mixed layers).
    confidence: it predicts the probability that a draft token is accepted
      (DSpark), by which `draft_length.adaptive` decides how much to draft.
    mask_token: whose embedding the slots after the anchor begin with; -1: a
      vector of their own.
  """

  causal: bool = False
  slots: str = "in_place"
  successor: str = "none"
  rank: int = 32
  candidates: int = 16
  taps: int = 0
  group: int = 16
  state: int = 0
  window: int = 0
  full_layers: tuple[int, ...] = ()
  causal_window: bool = False
  confidence: bool = False
  mask_token: int = -1

  def __post_init__(self):
    if isinstance(self.full_layers, list):  # of a file
      object.__setattr__(self, "full_layers", tuple(self.full_layers))
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      kind = typing.get_origin(field.type) or field.type
      if type(value) is not kind:
        raise ValueError(
          f"block.{field.name} = {value!r:.60}; it must be of type "
          f"{kind.__name__}"
        )
    check_choice("block.slots", self.slots, SLOTS)
    check_choice("block.successor", self.successor, SUCCESSORS)
    least = {"rank": 1, "state": 0, "window": 0, "mask_token": -1}
    least |= {"candidates": 1, "taps": 0, "group": 1}
    for name, low in least.items():
      if not low <= getattr(self, name) < 2**31:
        raise ValueError(
          f"block.{name} = {getattr(self, name)}; it must be >= {low}"
        )
    if (self.full_layers or self.causal_window) and not self.window:
      raise ValueError(
        f"block.full_layers = {self.full_layers} and block.causal_window = "
        f"{self.causal_window} need a block.window above 0"
      )

  def attention(self, layer: int) -> tuple[int | None, bool]:
    """Returns the window of a layer, None for all of the context, and whether
    it is causal in the block."""
    window = None if layer in self.full_layers else self.window or None
    return window, self.causal or (self.causal_window and window is not None)

  @property
  def offset(self) -> int:
    """Slots of a block ahead of the one that its first draft token is of."""
    return int(self.slots == "in_place")
