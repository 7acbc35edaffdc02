"""How to decode, as a value: what is wanted, checked; nothing is loaded.

Drafter, rule and shape are calls written as text (utils/calls.py, catalog.py).
"""

import dataclasses
import functools
import inspect
import pathlib
import typing
import zlib
from collections.abc import Iterable
from typing import Any

from specdec import checkpoints, decode, draft_shape, sampling, sharding
from specdec.benchmark import catalog
from specdec.benchmark.batches import PROMPT_STEP
from specdec.benchmark.catalog import DRAFTERS, RULES, SHAPES
from specdec.benchmark.target import PRESET, Target, check_kv
from specdec.checkpoints import shipped
from specdec.draft_shape import DraftShape
from specdec.drafters.heads.head_config import HeadConfig
from specdec.models import weight_formats
from specdec.models.config import TransformerConfig
from specdec.models.weight_formats import STORED
from specdec.types import AcceptanceRule
from specdec.utils import calls
from specdec.utils.calls import Call
from specdec.utils.spelling import choices

_KINDS = {str: "a text", int: "an integer", float: "a number", bool: "a bool"}


def kind_of(field: dataclasses.Field) -> type:
  """Returns str, int, float or bool, also of a field that may be None."""
  return (typing.get_args(field.type) or (field.type,))[0]


@dataclasses.dataclass(frozen=True)
class Settings:
  """What a `Setup` is made of; the flags of the programs have these texts.

  Attributes:
    target: Model whose text is wanted: a directory in Hugging Face's or
      Orbax's layout, a .gguf file, a hub name, a name of ours, or, with
      random_weights, preset:NAME.
    drafter: A call, as name(1, key=2), or of your own: file.py:name(...).
      lookup(ngram=5, min_ngram=3), model(NAME), translated(NAME) for a model
      with another tokenizer, early_exit(LAYER),
      layer_skip(attention=[1,3], mlp=[2], threshold=0.8), layer_skip(FILE) of
      choose_layers, quantized(group=256), which is the target in int8 with a
      scale for at most so many inputs, or quantized(int4, group=32);
      sparse(window=256, sinks=4), the target attending to so many last and
      first positions, also quantized(window=256);
      suffix(corpus=FILE, min_match=1, factor=1, min_prob=0.1), which copies
      what mostly followed, here and in the texts of --save_corpus; recycling,
      which drafts what the target last thought likely; head(FILE),
      head(FOLDER) or head(NAME), trained ones, ours or in a format of others,
      also head(NAME, weights=int8), or by their kind, as eagle3(FOLDER);
      block(FILE), one in rows of at most its levels; pard(NAME), a model taught
      to draft from masks; none. Two with | between them: the second, a head,
      quantized or sparse, drafts where the first has no draft:
      'lookup(k=4) | head(FILE)'. Default lookup, for a shipped target its
      draft.
    acceptance: A call, as name(1, key=2), or of your own: file.py:name(...).
      coupled: token for token the text of autoregressive sampling with this
      seed. rejection: the same distribution, other noise, accepts sampled
      drafts more often. block: the same distribution, evaluates a chain as a
      whole and accepts most. traversal: the same for trees, from the leaves
      upward. kseq, multipath: the same distribution, for iid chains.
      naive: the same distribution, accepts where a sample of the target is the
      drafted token. greedy: temperature 0 only. Lossy: lenience(share=0.5),
      fly(window=2, threshold=0.3, top=3), typical(epsilon=0.09, delta=0.3),
      relaxed(top=10, margin=0.6).
      synthetic(0.8) accepts at that rate whatever was drafted, and
      synthetic(length=3.2) at vLLM's rates for that mean acceptance length, 1
      to k + 1, to study speed; the text is meaningless. A rule of your own is
      taken at its word: specdec.testing.check_rule proves it.
    shape: A call. chain: k tokens in a row. chains(3): so many chains of k
      tokens; chains(3, shared=1): they share the first. optimal(12, [0.6,
      0.2]): the static tree of 12 draft tokens, at most k deep, that keeps
      most if a node's first, second ... child is kept so often; [[0.6, 0.2],
      ...]: by depth. comb(8, 4): a chain and siblings of its tokens, 8 in all
      at first and 4 later. dynamic(16, top=4): EAGLE-2's tree, k deep.
      paths(FILE): JSON, [[0], [1], [0, 0], ...], each the child to take at
      every step, from 0. Of these all but dynamic take siblings=iid,
      without_replacement or deterministic.
      adaptive(costs=[1, 1.2, ...]): at most k tokens in a row, as many as the
      batch expects to pay in every round; costs are those of rounds of 0 to k
      levels, by_depth and by_class what is accepted before it is known.
      entropy(limit=0.4, gamma=0.2): at most k, until 1 - sqrt(gamma H)
      of the draft falls below the limit (AdaEDL).
    k: Drafted tokens a round, 0 for none; of a tree its levels.
    temperature: 0 is greedy.
    top_k: Sample among the k likeliest tokens.
    top_p: Sample among the likeliest of this mass.
    batch: Prompts decoded together.
    prompt_size: Tokens that the longest prompt may have.
    max_new_tokens: A row stops here at the latest.
    dtype: Type of activations, caches and weights.
    weights: Type of the target's matrices, if not dtype; a call. float32,
      bfloat16; int8: one scale an output; int8(group=64), int4(group=32): a
      scale for so many inputs; stored: as the file holds them, Q8_0, Q4_0 and
      Q4_1 of GGUF or compressed-tensors. Of a draft model:
      model(NAME, weights=int8).
    kv: int8: keys and values in the target's cache, each with a scale, if not
      dtype. Of a draft model: model(NAME, kv=int8).
    num_nodes: Most tokens of a call, of a draft above all, for which the
      target's recurrent layers keep slots. Default: 64, or a preset's.
    random_weights: Take shapes only, and random weights: for speed, not for
      text.
    seed: Seed of all noise; a prompt's number is mixed in, and a corpus, which
      may hold what this seed wrote, unless the rule is coupled.
    mesh: data:N,model:M: N groups of M devices; each group has all weights, and
      shares out heads, inner columns and vocabulary among its M. Default: one
      device.
    draft_ways: Of the M devices of a group (mesh), how many share the draft's
      weights; 1: each has all of them. Default: M, but 1 of a trained head in
      integers, or of which M do not divide heads and inner columns.
  """

  target: str = shipped.TARGET
  drafter: str | None = None
  acceptance: str = "coupled"
  shape: str = "chain"
  k: int | None = None
  temperature: float = 0.0
  top_k: int | None = None
  top_p: float | None = None
  batch: int = 1
  prompt_size: int = 4 * PROMPT_STEP
  max_new_tokens: int = 128
  dtype: str = "float32"
  weights: str | None = None
  kv: str | None = None
  num_nodes: int | None = None
  random_weights: bool = False
  seed: int = 0
  mesh: str | None = None
  draft_ways: int | None = None

  def __post_init__(self):
    for field in dataclasses.fields(self):
      self._check_type(field)
    if self.drafter is None:
      draft = shipped.DRAFTS.get(self.target)
      drafter = f"model({draft})" if draft else "lookup"
      object.__setattr__(self, "drafter", drafter)
    for name in ("target", "drafter", "mesh"):
      if getattr(self, name) == "":
        raise ValueError(f"{name} is empty; give a name or leave it out")
    for name in ("batch", "prompt_size", "max_new_tokens"):
      if getattr(self, name) < 1:
        raise ValueError(f"{name} = {getattr(self, name)}; it must be >= 1")
    if self.num_nodes is not None and self.num_nodes < 1:
      raise ValueError(f"num_nodes = {self.num_nodes}; it must be >= 1")
    if self.k is not None and not 0 <= self.k <= catalog.MAX_DRAFT:
      raise ValueError(
        f"k = {self.k:,}; it must be in 0..{catalog.MAX_DRAFT:,}"
      )
    if self.dtype not in checkpoints.DTYPES:
      raise ValueError(f"dtype: {choices(self.dtype, checkpoints.DTYPES)}")
    weight_formats.parse(self.weights)
    check_kv(self.kv)
    if self.target.startswith(PRESET) and not self.random_weights:
      raise ValueError(
        f"{self.target} is a shape alone; add random_weights=True"
      )
    if self.mesh is not None:
      sharding.parse(self.mesh)
    elif self.draft_ways is not None:
      raise ValueError("draft_ways is for a mesh")
    self._check_sampling()
    self._check_drafters()

  def _check_draft_ways(self) -> None:
    """Refuses to share out a drafter whose weights have no rule for it."""
    if not self.has_heads and self.call_of("model", "pard") is None:
      raise ValueError(
        "draft_ways is for a draft model or a trained head, and "
        f"{self.drafter} is none"
      )
    if self.draft_ways < 1:
      raise ValueError(f"draft_ways = {self.draft_ways}; it must be >= 1")
    if self.has_heads and self.draft_ways > 1:
      self._check_head_is_not_in_integers()

  def _check_head_is_not_in_integers(self) -> None:
    """Refuses values with scales, which would have to be cut together."""
    head = self.call_of(*catalog.HEADS)
    if catalog.arguments_of(head)["weights"] is not None:
      raise ValueError(
        f"{self.drafter}: a trained head in integers is not shared out; "
        "draft_ways = 1 is possible"
      )

  def head_ways(self, target: TransformerConfig, ways: int) -> int:
    """Returns how many of so many devices share out the trained head: all, if
    they can, else one, but `draft_ways` if it is given.

    Raises:
      ValueError: the head can't be shared out `draft_ways` ways.
    """
    wanted = self.draft_ways or ways
    if wanted == 1:
      return 1
    counts = self.head_config(target).counts
    try:
      self._check_head_is_not_in_integers()
      sharding.check_divides(counts, wanted, self.drafter)
      sharding.check_nesting(
        sharding.shards(ways, target.counts["key"]),
        sharding.shards(wanted, counts["key"]),
      )
    except ValueError:
      if self.draft_ways:
        raise
      return 1
    return wanted

  def _check_type(self, field: dataclasses.Field) -> None:
    """Refuses a value of another type, or beyond 32 bits."""
    name, kind, value = field.name, kind_of(field), getattr(self, field.name)
    if value is None and field.type is not kind:
      return
    accepted = isinstance(value, (int, float) if kind is float else kind)
    if not accepted or isinstance(value, bool) != (kind is bool):
      raise ValueError(f"{name} = {value!r:.60}; it must be {_KINDS[kind]}")
    # Beyond, JAX would take a seed's lowest bits.
    most = 2**32 if name == "seed" else 2**31
    if type(value) is int and not -(2**31) <= value < most:
      raise ValueError(f"{name} = {value}; it must be in -2**31..{most - 1}")
    if kind is float:  # 1 and 1.0 are one setting
      object.__setattr__(self, name, float(value))

  def _check_sampling(self) -> None:
    sampling.settings(1, self.temperature, self.top_k, self.top_p)
    if self.temperature == 0 and not (self.top_k is self.top_p is None):
      raise ValueError(
        "top_k and top_p filter what is sampled, and temperature = 0 samples "
        "nothing; leave them out, or raise the temperature"
      )
    if self.temperature > 0 and self.make_rule().name == "greedy":
      raise ValueError(
        f"acceptance = greedy at temperature = {self.temperature:g} would not "
        "sample; take coupled or rejection, or temperature 0"
      )

  def _check_drafters(self) -> None:
    """Refuses what needs no weights to be seen."""
    if len(self.drafter_calls) > 2:
      raise ValueError(f"{self.drafter}: at most two drafters, with one |")
    calls_with_k = [call for call in self.drafter_calls if "k" in call.kwargs]
    if calls_with_k and len(self.drafter_calls) == 1:
      raise ValueError(
        f"{self.drafter}: k within a call is for the first of two drafters; "
        "give it apart, as --k=4"
      )
    if self._shape_call.name == "paths" and self.k not in (None, self._depth):
      raise ValueError(
        f"shape = {self.shape} is one tree, whatever k = {self.k} says; leave "
        "k out"
      )
    if not self.levels and self.shape != "chain":
      raise ValueError(f"shape = {self.shape} needs k >= 1, the tree's levels")
    if self.draft_ways is not None:
      self._check_draft_ways()
    shape, rule, leading = self.make_shape(), self.make_rule(), 0
    length = self.synthetic_length
    if length is not None and self.shape != "chain":
      raise ValueError(
        f"acceptance = {self.acceptance}: a length is for chains, and shape = "
        f"{self.shape}; give rates"
      )
    if length is not None and length > self.levels + 1:
      raise ValueError(
        f"acceptance = {self.acceptance}: a mean acceptance length is at most "
        f"k + 1 = {self.levels + 1}"
      )
    for number, call in enumerate(self.drafter_calls):
      constructor = calls.find(call, DRAFTERS, "drafter")
      call, context = self._context(call, None, number, leading)
      leading = context["shape"].spec.max_depth
      if call.place is not None:
        taken = inspect.signature(constructor).parameters
        if "shape" not in taken and self.shape != "chain":
          raise ValueError(
            f"{call} takes no shape, and shape = {self.shape}; give its "
            "function a parameter shape, or leave the shape out"
          )
        if not {"k", "shape"} & {*taken} and self.k is not None:
          raise ValueError(
            f"{call} takes neither k nor shape, and k = {self.k}; leave k out"
          )
        continue
      calls.bind(call, constructor, context)
      spec = shape.spec._replace(name=call.name)
      if call.name in ("lookup", "recycling", "suffix"):
        built = calls.invoke(call, constructor, context)
        spec = getattr(built, "drafter", built).spec
      if call.name in ("early_exit", "layer_skip", "quantized", "sparse"):
        draft_shape.check_scratch(shape)
      if number == len(self.drafter_calls) - 1 and call.name != "none":
        decode.check_pair(spec, rule)

  @functools.cached_property
  def drafter_calls(self) -> list[Call]:
    """The drafter's calls, parsed."""
    return calls.parse_all(self.drafter)

  @property
  def levels(self) -> int:
    """Levels of a draft: k, or the drafter's default."""
    if self._shape_call.name == "paths":
      return self._depth
    if self.k is not None:
      return self.k
    call = self.drafter_calls[-1]
    if call is self.call_of("layer_skip"):
      return catalog.arguments_of(call).get("k", catalog.DEFAULT_K[call.name])
    name = call.name if call.place is None else ""
    return catalog.DEFAULT_K.get(name, catalog.OTHER_K)

  def call_of(self, *names: str) -> Call | None:
    """Returns the call of one of our drafters with such a name, if there is."""
    ours = (call for call in self.drafter_calls if call.place is None)
    return next((call for call in ours if call.name in names), None)

  @functools.cached_property
  def _shape_call(self) -> Call:
    return calls.parse(self.shape)

  @functools.cached_property
  def _rule_call(self) -> Call:
    return calls.parse(self.acceptance)

  @functools.cached_property
  def rule_arguments(self) -> dict[str, Any]:
    """The arguments of the acceptance rule's call, by name."""
    call = self._rule_call
    bound = calls.bind(call, calls.find(call, RULES, "acceptance rule"), {})
    bound.apply_defaults()
    return dict(bound.arguments)

  @property
  def synthetic_length(self) -> float | None:
    """The mean acceptance length that synthetic(length=) was given."""
    ours = self._rule_call.place is None and self._rule_call.name == "synthetic"
    return self.rule_arguments["length"] if ours else None

  @property
  def _depth(self) -> int:
    """Depth of the tree that paths(FILE) holds."""
    context = {"siblings": "iid"}
    shape = calls.invoke(self._shape_call, SHAPES["paths"], context)
    return shape.spec.max_depth

  @property
  def description(self) -> str:
    """The drafter and its shape, for tables and pages."""
    if self.shape == "chain":
      return self.drafter
    call = self._shape_call
    if call.name == "adaptive":  # a table of costs is too long for a line
      call = call._replace(args=(), kwargs={})
    return f"{self.drafter}, {call}"

  @property
  def comparable(self) -> bool:
    """Whether the text should equal the baseline's, token for token."""
    rule = self.make_rule()
    exact = self.temperature == 0 or rule.traversal == "coupled"
    return rule.lossless and exact

  @property
  def caveats(self) -> list[str]:
    """What must be printed wherever results are."""
    caveats = [self.make_rule().caveat]
    form = weight_formats.parse(self.weights)
    if form and form.kind not in (STORED, "float32", self.dtype):
      caveats.append(
        f"weights in {self.weights}: what is lossless is so relative to the "
        f"target in {form.kind}, not to the weights of its file"
      )
    if self.kv:
      caveats.append(
        f"keys and values in {self.kv}: what is lossless is so relative to the "
        "target that reads them, and coupled texts part sooner than in float32"
      )
    if self.random_weights:
      caveats.append(
        "random weights: nothing follows for a trained model's text"
      )
    return [caveat for caveat in caveats if caveat]

  def checksums(self) -> dict[str, int]:
    """Returns checksums of the files that drafter, rule and shape name."""
    texts = [
      text
      for call in (*self.drafter_calls, self._rule_call, self._shape_call)
      for text in (call.place, *call.args, *call.kwargs.values())
      if isinstance(text, str)
    ]
    return checksums_of(texts)

  def make_rule(self) -> AcceptanceRule:
    """Builds the acceptance rule."""
    call = self._rule_call
    rule = calls.invoke(call, calls.find(call, RULES, "acceptance rule"), {})
    if not isinstance(rule, AcceptanceRule):
      raise ValueError(
        f"{call} returned {type(rule).__name__}; it must be an AcceptanceRule"
      )
    return rule

  def make_shape(self) -> DraftShape:
    """Builds the draft's shape.

    Children of a tree are deterministic at temperature 0, iid for kseq and
    multipath, else without_replacement, unless the call has `siblings`.
    """
    call = self._shape_call
    siblings = "without_replacement"
    if self._rule_call.name in ("kseq", "multipath"):
      siblings = "iid"
    elif self.temperature == 0:
      siblings = "deterministic"  # there is but one token to draw
    context = {"k": self.levels, "siblings": siblings}
    return calls.invoke(call, calls.find(call, SHAPES, "draft shape"), context)

  def _context(
    self, call: Call, target: Target | None, number: int, leading: int
  ) -> tuple[Call, dict[str, Any]]:
    """Returns a drafter's call without its k, and what it may be passed.

    Args:
      leading: tokens that the drafter before it may draft.
    """
    context = {
      "target": target,
      "k": self.levels,
      "shape": self.make_shape(),
      "acceptance": self._rule_call.name,
      "leads": number + 1 < len(self.drafter_calls),
    }
    if number:
      context["max_external_drafts"] = leading
    if "k" in call.kwargs:  # of this drafter, a chain
      k = call.kwargs["k"]
      if type(k) is not int or k > catalog.MAX_DRAFT:
        raise ValueError(
          f"{call}: k = {k!r}; it must be an integer, at most "
          f"{catalog.MAX_DRAFT:,}"
        )
      context |= {"k": k, "shape": draft_shape.chain(k)}
    return catalog.without_k(call), context

  @property
  def has_user_drafter(self) -> bool:
    """Whether a function of a user's file or module drafts."""
    return any(call.place is not None for call in self.drafter_calls)

  @property
  def has_heads(self) -> bool:
    """Whether a trained head drafts."""
    return self.call_of(*catalog.HEADS) is not None

  @property
  def most_levels(self) -> int | None:
    """Levels that a head has at most; None: any number."""
    if not self.has_heads:
      return None
    return self.head_config(self.target_config()).most_levels

  def head_config(self, target: TransformerConfig) -> HeadConfig:
    """Returns the config of the trained head that drafts; reads no weights."""
    file = catalog.arguments_of(self.call_of(*catalog.HEADS))["file"]
    return catalog.inspect_head(file, target)[1]


def checksums_of(names: Iterable[str]) -> dict[str, int]:
  """Returns a checksum of every file among names."""
  paths = {name: pathlib.Path(name).expanduser() for name in names}
  return {
    name: zlib.crc32(path.read_bytes())
    for name, path in paths.items()
    if path.is_file()
  }
