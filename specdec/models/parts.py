"""Parts of a transformer that only some families have, as plain data."""

import dataclasses

from specdec.models.checks import check_counts, check_positive
from specdec.utils.spelling import check_choice

_TILE = 8  # rows of 32 bits
GATED_DELTA, MAMBA2 = RECURRENCES = "gated_delta", "mamba2"


@dataclasses.dataclass(frozen=True)
class Recurrence:
  """Layers that keep a state in the place of keys and values."""

  kind: str  # of RECURRENCES: arXiv:2412.06464 (Qwen3-Next), arXiv:2405.21060
  layers: tuple[int, ...]  # which; the others have attention
  num_heads: int  # of values, each with a state [key_dim, value_dim]
  num_key_heads: int  # of keys and queries; divides num_heads
  key_dim: int
  value_dim: int
  kernel: int = 4  # tokens that the causal convolution sees
  conv_bias: bool = False
  # Most tokens of a call, and how many positions a drafter may roll back. The
  # cache has slots for twice as many and a quarter. It changes no output.
  num_nodes: int = 64

  def __post_init__(self):
    check_choice("recurrence.kind", self.kind, RECURRENCES)
    check_counts(
      self,
      *("num_heads", "num_key_heads", "key_dim", "value_dim"),
      *("kernel", "num_nodes"),
    )
    if self.num_heads % self.num_key_heads:
      raise ValueError(
        f"num_heads = {self.num_heads} of the recurrence is not a multiple of "
        f"num_key_heads = {self.num_key_heads}"
      )
    if not self.layers or sorted(set(self.layers)) != list(self.layers):
      raise ValueError(
        f"layers = {self.layers} of the recurrence; give ascending indices"
      )

  @property
  def channels(self) -> int:
    """Channels of the convolution: queries, keys and values."""
    keys = self.num_key_heads * self.key_dim
    return 2 * keys + self.num_heads * self.value_dim

  def num_parameters(self, width: int) -> int:
    """Weights of one layer, without norms in front of it."""
    inner = self.num_heads * self.value_dim
    small = 2 if self.kind == GATED_DELTA else 1  # rows a head, b and a
    rows = self.channels + inner + small * self.num_heads
    own = (2 if self.kind == GATED_DELTA else 3) * self.num_heads
    own += self.channels * (self.kernel + self.conv_bias)
    own += self.value_dim if self.kind == GATED_DELTA else inner  # the norm
    return width * (rows + inner) + own

  @property
  def state_size(self) -> int:
    """Values of the state of a row in one layer, float32."""
    return self.num_heads * self.key_dim * self.value_dim

  def row_bytes(self, dtype: str) -> tuple[int, int]:
    """Returns bytes that one layer keeps for a row: of all heads, their states
    and slots, and of all key heads, slots.

    Args:
      dtype: of activations.
    """
    inputs, key_inputs = self.input_bytes(dtype)
    values = 4 * self.num_slots * self.num_heads * (self.value_dim + 1)
    keys = 4 * self.num_slots * self.num_key_heads * self.key_dim
    return 4 * self.state_size + values + inputs, keys + key_inputs

  def input_bytes(self, dtype: str) -> tuple[int, int]:
    """Returns those bytes of `row_bytes` that are inputs of the convolution, of
    which a pass reads few."""
    size = 4 if dtype == "float32" else 2
    size *= self.num_before + self.num_slots
    keys = 2 * self.num_key_heads * self.key_dim
    return size * self.num_heads * self.value_dim, size * keys

  def slot_bytes(self, dtype: str) -> tuple[int, int]:
    """Returns bytes of a position's slot in one layer: of all heads, and of all
    key heads; `dtype` as of `row_bytes`."""
    size = 4 if dtype == "float32" else 2
    values = 4 * (self.value_dim + 1) + size * self.value_dim
    keys = (4 + 2 * size) * self.key_dim
    return self.num_heads * values, self.num_key_heads * keys

  @property
  def capacity(self) -> int:
    """Most positions in slots, a call's nodes included."""
    return 2 * self.num_nodes + max(1, self.num_nodes // 4)

  @property
  def num_slots(self) -> int:
    """Slots, in whole tiles of a TPU: others would have another layout where a
    program begins."""
    return -(-self.capacity // _TILE) * _TILE

  @property
  def num_before(self) -> int:
    """Inputs of the convolution ahead of the first slot's, of which the last
    are the kernel's; with the slots' they fill tiles of 16 bits."""
    least = self.num_slots + self.kernel - 1
    return -(-least // (2 * _TILE)) * 2 * _TILE - self.num_slots

  @property
  def slack(self) -> int:
    """Positions that slots gather before they enter the state, nodes of the
    call that finds no room included: then all but num_nodes of them do."""
    return self.capacity - self.num_nodes


@dataclasses.dataclass(frozen=True)
class Latent:
  """Multi-head latent attention (MLA, arXiv:2405.04434, section 2.1).

  A position keeps one vector, of which every head's key and value are linear
  maps, and one rotated key that all heads share.
  """

  rank: int  # of the vector
  key_dim: int  # of a head's query and key, without the rotated part
  rotary_dims: int  # of the rotated part
  value_dim: int
  query_rank: int | None = None  # through which queries pass; None: a full map

  def __post_init__(self):
    check_counts(self, "rank", "key_dim", "rotary_dims", "value_dim")
    if self.query_rank is not None:
      check_counts(self, "query_rank")

  @property
  def cached(self) -> int:
    """Values that a layer keeps of a position."""
    return self.rank + self.rotary_dims

  def num_parameters(self, width: int, num_heads: int) -> int:
    """Weights of one layer's attention, its norms included."""
    queries = num_heads * (self.key_dim + self.rotary_dims)
    if self.query_rank is None:
      query = width * queries
    else:
      query = (width + queries + 1) * self.query_rank
    down = width * self.cached + self.rank
    up = self.rank * num_heads * (self.key_dim + self.value_dim)
    return query + down + up + num_heads * self.value_dim * width


@dataclasses.dataclass(frozen=True)
class GroupRouting:
  """Routing of DeepSeek-V3 (arXiv:2412.19437, section 2.1.2).

  A token scores every expert by a sigmoid. Of the groups whose two best scores
  sum to the most, the experts of the best scores are chosen; a bias of each
  expert is added for the choice alone, and balanced their load in training.
  """

  groups: int  # of as many experts each
  groups_per_token: int
  scale: float = 1.0  # multiplies the weights of a token's experts

  def __post_init__(self):
    check_counts(self, "groups", "groups_per_token")
    check_positive(self, "scale")
    if self.groups_per_token > self.groups:
      raise ValueError(
        f"groups_per_token = {self.groups_per_token} of {self.groups} groups"
      )
