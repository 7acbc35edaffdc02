"""A way of decoding named by a few words, and the one place that loads it.

Drafter, rule and shape are calls written as text (utils/calls.py, catalog.py):

  Setup("stdlib-11m", drafter="model(stdlib-1m)", k=3)
  Setup("stdlib-11m", drafter="lookup(k=4) | eagle3(runs/x/best.safetensors)")
  Setup("stdlib-11m", drafter="mine.py:bigram(text=x.txt)", temperature=1.0,
        acceptance="typical(epsilon=0.1)", shape="chains(3)")

A sweep is a list of `dataclasses.replace(setup, ...)`, whose decoders share one
loaded target: `target = setup.load_target()`, then `setup.decoder(target)`.
"""

import dataclasses
import functools
import inspect
import pathlib
import typing
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from specdec import (
  checkpoints,
  decode,
  draft_shape,
  drafters,
  sampling,
  sharding,
)
from specdec.benchmark import catalog
from specdec.benchmark.catalog import DRAFTERS, RULES, SHAPES, Target, Weighted
from specdec.benchmark.decoder import PROMPT_STEP, Decoder
from specdec.checkpoints import learned as saved
from specdec.checkpoints import shipped
from specdec.compiled import lowering, memory_plan
from specdec.draft_shape import DraftShape
from specdec.models import transformer
from specdec.models.config import TransformerConfig
from specdec.roofline import drafter_cost
from specdec.types import (
  NO_COST,
  UNKNOWN_COST,
  AcceptanceRule,
  Drafter,
  Params,
)
from specdec.utils import calls
from specdec.utils.calls import Call
from specdec.utils.spelling import choices


def silent(text: str) -> None:
  """Reports nothing."""


def _check_type(field: dataclasses.Field, value) -> None:
  """Refuses what a config may hold in a field's place."""
  words = {str: "a text", int: "an integer", float: "a number", bool: "a bool"}
  union = typing.get_args(field.type) or (field.type,)
  kinds = [kind for kind in union if kind in words]
  accepted = (*kinds, int) if float in kinds else tuple(kinds)
  if value is None:
    right = len(union) > 1
  else:
    right = isinstance(value, accepted) and isinstance(value, bool) == (
      bool in kinds
    )
  if not right:
    raise ValueError(
      f"{field.name} = {value!r:.60}; it must be {words[kinds[0]]}"
    )
  # Beyond, JAX would take a seed's lowest bits.
  most = 2**32 if field.name == "seed" else 2**31
  if type(value) is int and not -(2**31) <= value < most:
    raise ValueError(
      f"{field.name} = {value}; it must be in -2**31..{most - 1}"
    )


@dataclasses.dataclass(frozen=True)
class Setup:
  """One way of decoding.

  Attributes:
    target: a directory, a .gguf file, a hub name, a shipped model, or
      preset:NAME with random_weights.
    drafter: a call, or two with | between them: where the first has no draft,
      the second drafts. Default: lookup; model(stdlib-1m) for the shipped
      target.
    acceptance, shape: calls.
    k: tokens of a chain, levels of a tree; default by the drafter.
    temperature, top_k, top_p: of sampling; 0 is greedy.
    batch: prompts decoded together.
    prompt_size: tokens that the longest prompt may have.
    max_new_tokens: of each row.
    dtype: of weights and caches.
    random_weights: shapes alone are read.
    seed: of all noise.
    mesh: data:N,model:M, over all devices; None: one device.
    draft_ways: of the M, how many devices share the draft model's weights.
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
  random_weights: bool = False
  seed: int = 0
  mesh: str | None = None
  draft_ways: int | None = None

  def __post_init__(self):
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      _check_type(field, value)
      if field.type is float:  # 1 and 1.0 are one setting
        object.__setattr__(self, field.name, float(value))
    if self.drafter is None:
      shipped_pair = self.target == shipped.TARGET
      drafter = f"model({shipped.DRAFT})" if shipped_pair else "lookup"
      object.__setattr__(self, "drafter", drafter)
    for name in ("target", "drafter", "mesh"):
      if getattr(self, name) == "":
        raise ValueError(f"{name} is empty; give a name or leave it out")
    for name in ("batch", "prompt_size", "max_new_tokens"):
      if getattr(self, name) < 1:
        raise ValueError(f"{name} = {getattr(self, name)}; it must be >= 1")
    if self.k is not None and not 0 <= self.k <= catalog.MAX_DRAFT:
      raise ValueError(
        f"k = {self.k:,}; it must be in 0..{catalog.MAX_DRAFT:,}"
      )
    if self.dtype not in checkpoints.DTYPES:
      raise ValueError(f"dtype: {choices(self.dtype, checkpoints.DTYPES)}")
    if self.target.startswith(catalog.PRESET) and not self.random_weights:
      raise ValueError(
        f"{self.target} is a shape alone; add random_weights=True"
      )
    if self.mesh is None and self.draft_ways is not None:
      raise ValueError("draft_ways is for a mesh")
    if self.mesh is not None:
      sharding.parse(self.mesh)
    self._check_sampling()
    self._check_drafters()

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
        "give the setting k"
      )
    if self._shape_call.name == "paths" and self.k not in (None, self._depth):
      raise ValueError(
        f"shape = {self.shape} is one tree, whatever k = {self.k} says; leave "
        "k out"
      )
    if not self.levels and self.shape != "chain":
      raise ValueError(f"shape = {self.shape} needs k >= 1, the tree's levels")
    if self.draft_ways is not None and self.call_of("model") is None:
      raise ValueError(
        f"draft_ways is for a draft model, and {self.drafter} is none"
      )
    shape, rule, leading = self.make_shape(), self.make_rule(), 0
    for number, call in enumerate(self.drafter_calls):
      constructor = calls.find(call, DRAFTERS)
      call, context = self._context(call, None, number, leading)
      leading = context["shape"].spec.max_depth
      if call.place is not None:
        self._check_own(call, constructor)
        continue  # its spec is its own
      calls.bind(call, constructor, context)
      spec = shape.spec._replace(name=call.name)
      if call.name == "lookup":
        spec = calls.invoke(call, constructor, context).spec
      if call.name in ("early_exit", "layer_skip"):
        draft_shape.check_scratch(shape)
      if number == len(self.drafter_calls) - 1 and call.name != "none":
        decode.check_pair(spec, rule)

  def _check_own(self, call: Call, constructor: Callable) -> None:
    """Refuses settings that a user's constructor does not take."""
    taken = inspect.signature(constructor).parameters
    if "shape" not in taken and self.shape != "chain":
      raise ValueError(f"{call} takes no shape, and shape = {self.shape}")
    if not {"k", "shape"} & {*taken} and self.k is not None:
      raise ValueError(
        f"{call} takes neither k nor shape, and k = {self.k}; leave k out"
      )

  @classmethod
  def from_config(cls, config: Mapping) -> "Setup":
    """Makes one of a dict or an ml_collections.ConfigDict.

    Raises:
      ValueError: it has an entry that is no field.
    """
    names = [field.name for field in dataclasses.fields(cls)]
    for name in config:
      if name not in names:
        raise ValueError(f"setting {name} is unknown; {choices(name, names)}")
    return cls(**{name: config[name] for name in config})

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

  @property
  def _depth(self) -> int:
    """Depth of the tree that paths(FILE) holds."""
    context = {"siblings": "iid"}
    shape = calls.invoke(self._shape_call, SHAPES["paths"], context)
    return shape.spec.max_depth

  @property
  def identity(self) -> tuple:
    """What decides on the loaded target; a decoder's target must agree."""
    fields = [self.target, self.dtype, self.random_weights, self.mesh]
    if self.random_weights:
      fields.append(self.seed)
    if self.mesh:  # it places the drafter, too
      fields += [self.drafter, self.draft_ways]
    return tuple(fields)

  @property
  def description(self) -> str:
    """The drafter and its shape, for tables and pages."""
    return (
      self.drafter
      if self.shape == "chain"
      else (f"{self.drafter}, {self.shape}")
    )

  @property
  def comparable(self) -> bool:
    """Whether the text should equal the baseline's, token for token."""
    rule = self.make_rule()
    coupled = rule.traversal == "coupled"
    return rule.lossless and (self.temperature == 0 or coupled)

  @property
  def caveats(self) -> list[str]:
    """What must be printed wherever results are."""
    caveats = [self.make_rule().caveat] if self.make_rule().caveat else []
    if self.random_weights:
      caveats.append(
        "random weights: nothing follows for a trained model's text"
      )
    return caveats

  def checksums(self) -> dict[str, int]:
    """Returns checksums of the files that drafter, rule and shape name."""
    named = [*self.drafter_calls, calls.parse(self.acceptance)]
    texts = [
      text
      for call in (*named, self._shape_call)
      for text in (call.place, *call.args, *call.kwargs.values())
      if isinstance(text, str)
    ]
    paths = {text: pathlib.Path(text).expanduser() for text in texts}
    return {
      text: zlib.crc32(path.read_bytes())
      for text, path in paths.items()
      if path.is_file()
    }

  def make_rule(self) -> AcceptanceRule:
    """Builds the acceptance rule."""
    call = calls.parse(self.acceptance)
    rule = calls.invoke(call, calls.find(call, RULES), {})
    if not isinstance(rule, AcceptanceRule):
      raise ValueError(
        f"{call} returns a {type(rule).__name__}; it must be an AcceptanceRule"
      )
    return rule

  def make_shape(self) -> DraftShape:
    """Builds the draft's shape.

    Children of a tree are deterministic at temperature 0, iid for kseq, else
    without_replacement, unless the call has `siblings`.
    """
    call = self._shape_call
    siblings = "without_replacement"
    if calls.parse(self.acceptance).name == "kseq":
      siblings = "iid"
    elif self.temperature == 0:
      siblings = "deterministic"  # there is but one token to draw
    context = {"k": self.levels, "siblings": siblings}
    return calls.invoke(call, calls.find(call, SHAPES), context)

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
      "acceptance": calls.parse(self.acceptance).name,
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
      kwargs = {name: x for name, x in call.kwargs.items() if name != "k"}
      call = call._replace(kwargs=kwargs)
    return call, context

  def check_sources(self) -> None:
    """Refuses what the files of target and drafter say; reads no weights.

    Raises:
      ValueError: drafter and target do not go together.
      FileNotFoundError: a model or a file is not there.
    """
    config = catalog.config_of(catalog.source_of(self.target), self.dtype)
    self.memory_plan(config, self.places(config))

  def load(self, report: Callable[[str], None] = silent) -> Decoder:
    """Reads the weights and returns the decoder, not yet compiled.

    Args:
      report: is told the memory plan and what is loaded.

    Raises:
      ValueError: drafter, rule, shape and target do not go together.
      FileNotFoundError: a model or a file is not there.
      MemoryError: it would not fit.
    """
    return self.decoder(self.load_target(report))

  def load_target(
    self,
    report: Callable[[str], None] = silent,
    packed: bool = True,
    others: Sequence["Setup"] = (),
    num_tokens: int = 0,
  ) -> Target:
    """Checks memory, and the drafter as far as its files say, then loads.

    Args:
      packed: rearrange weights for decoding on a CPU.
      others: setups whose decoders will share it; they are checked as well.
      num_tokens: of the largest pass of the target apart from decoding, a row.
    """
    source = catalog.source_of(self.target)
    config = catalog.config_of(source, self.dtype)
    places = self.places(config)
    plan = self.memory_plan(config, places, num_tokens=num_tokens)
    report(f"memory on each device: {plan}")
    place = places and places.target
    memory_plan.check(plan, place)
    for other in others:
      memory_plan.check(other.memory_plan(config, places), place)
    if self.random_weights:
      report(f"random weights for {source}")
      checkpoint = checkpoints.random_checkpoint(
        config, self.seed, str(source), place
      )
    else:
      report(f"loading {source}")
      checkpoint = checkpoints.load(source, self.dtype, place)
    fingerprint = None
    heads = any(setup.has_heads for setup in (self, *others))
    if not self.random_weights and heads:
      fingerprint = saved.fingerprint(checkpoint)
    if packed and not places:
      checkpoint = checkpoint.packed()
    return Target(
      transformer.model(config, place),
      checkpoint,
      self.dtype,
      self.random_weights,
      self.seed,
      places,
      fingerprint,
      self.identity,
      drafts={},
    )

  @property
  def has_heads(self) -> bool:
    """Whether a trained head drafts."""
    return self.call_of(*catalog.HEADS) is not None

  @property
  def most_levels(self) -> int | None:
    """Levels that a head has at most; None: any number."""
    call = self.call_of(*catalog.HEADS)
    if call is None:
      return None
    path = shipped.drafter(catalog.arguments_of(call)["file"])
    return saved.inspect(path).most_levels

  def places(
    self, config: TransformerConfig, devices=None
  ) -> sharding.Places | None:
    """Returns where target and drafter lie on the mesh; None without one.

    Args:
      config: the target's.
      devices: default all of JAX's.
    """
    if self.mesh is None:
      return None
    draft, ways = self._draft_config, self.draft_ways
    counts = draft and draft.counts
    if self.has_heads:  # every device has all of a head
      counts, ways = config.counts, 1
    return sharding.places(self.mesh, config.counts, counts, ways, devices)

  @property
  def _draft_config(self) -> TransformerConfig | None:
    """The config of the draft model, if there is one."""
    call = self.call_of("model")
    if call is None:
      return None
    name = str(catalog.arguments_of(call)["name"])
    return catalog.config_of(catalog.source_of(name), self.dtype)

  def memory_plan(
    self,
    config: TransformerConfig,
    places: sharding.Places | None = None,
    decoder: Decoder | None = None,
    num_tokens: int = 0,
  ) -> memory_plan.Plan:
    """Estimates what decoding needs on each device.

    Args:
      config: the target's.
      num_tokens: of the largest other pass of the target, a row.
      decoder: whose drafter is planned for as it is; None: nothing is loaded
        yet, and a user's drafter is left out.
    """
    if decoder is not None:
      cost = decoder.drafter_cost
    else:
      drafter = self._abstract_drafter(config, places)
      cost = (drafter and drafter.cost) or UNKNOWN_COST
    draft = self._draft_config
    if draft is not None:  # it is planned for by its config
      cost = NO_COST
      size = config.vocab_size
      draft = dataclasses.replace(draft, vocab_size=size)
    leading = (call.kwargs.get("k", 0) for call in self.drafter_calls)
    return memory_plan.plan(
      config,
      draft,
      batch=self.batch,
      max_length=self.prompt_size + self.max_new_tokens,
      num_nodes=max(
        self.make_shape().spec.max_nodes, 1 + max(leading), num_tokens
      ),
      places=places,
      drafter=cost,
      prompt_size=self.prompt_size,
      random_weights=self.random_weights and decoder is None,
      cpu=jax.default_backend() == "cpu",
    )

  def check_memory(
    self,
    target: Target,
    decoder: Decoder,
    report: Callable[[str], None] | None = None,
    again: bool = False,
  ) -> None:
    """Checks that a decoder of loaded weights fits.

    Args:
      report: is told the plan of a user's drafter, and any with `again`.

    Raises:
      MemoryError: it does not.
    """
    plan = self.memory_plan(target.checkpoint.config, target.places, decoder)
    own = any(call.place is not None for call in self.drafter_calls)
    if report and (again or own):  # a user's was not in the first plan
      report(f"memory on each device: {plan}")
    place = target.places and target.places.target
    memory_plan.check(plan.excluding_weights, place)

  def _abstract_drafter(
    self, config: TransformerConfig, places: sharding.Places | None
  ) -> Drafter | None:
    """Builds the drafter without weights, which refuses what does not fit.

    Returns:
      None where it is a user's own.

    Raises:
      ValueError: drafter and target do not go together.
    """
    if any(call.place is not None for call in self.drafter_calls):
      return None
    draft = self._draft_config
    if draft is not None and not self.random_weights:
      checkpoints.check_vocabulary(config.vocab_size, draft.vocab_size)
    place = places and places.target
    weights = lowering.weights(config, place)
    target = Target(
      transformer.model(config, place),
      checkpoints.Checkpoint(config, weights, None, (), self.target),
      self.dtype,
      random_weights=True,
      seed=self.seed,
      places=places,
      drafts={},
      abstract=True,
    )
    return self.make_drafter(target).drafter

  def decoder(self, target: Target) -> Decoder:
    """Builds the decoder of a loaded target, not yet compiled.

    Raises:
      ValueError: the target was loaded for another setup.
    """
    if target.identity != self.identity:
      raise ValueError(
        f"this target was loaded for {target.identity}, and not for "
        f"{self.identity}"
      )
    if self.has_heads and not (target.fingerprint or target.random_weights):
      raise ValueError(
        f"{self.drafter} was trained for one target, and this one was loaded "
        "without its fingerprint: load_target(others=[the setup with the head])"
      )
    weighted = self.make_drafter(target)
    nothing = weighted.drafter is decode.NO_DRAFTER
    return Decoder(
      target.model,
      weighted.drafter,
      decode.NO_DRAFT_RULE if nothing else self.make_rule(),
      Params(target.checkpoint.params, weighted.params),
      jax.random.key(self.seed),
      batch=self.batch,
      prompt_size=self.prompt_size,
      max_new_tokens=self.max_new_tokens,
      eos_ids=target.checkpoint.eos_ids,
      temperature=self.temperature,
      top_k=self.top_k,
      top_p=self.top_p,
      places=target.places,
      tokenizer=target.checkpoint.tokenizer,
    )

  def make_drafter(self, target: Target) -> Weighted:
    """Builds the drafter of a loaded target and reads its weights."""
    built: list[Weighted] = []
    for number, call in enumerate(self.drafter_calls):
      leading = built[-1].drafter.spec.max_depth if built else 0
      bare, context = self._context(call, target, number, leading)
      constructor = calls.find(call, DRAFTERS)
      result = calls.invoke(bare, constructor, context)
      pair = [result] if isinstance(result, Drafter) else result
      pair = pair if isinstance(pair, list | tuple) else [pair]
      if len(pair) > 2 or not isinstance(pair[0], Drafter):
        raise ValueError(
          f"{call} returns a {type(result).__name__}; it must be a Drafter, or "
          "a pair of a Drafter and its weights"
        )
      built.append(Weighted(*pair))
      depth, wanted = pair[0].spec.max_depth, context["k"]
      taken = {"k", "shape"} & {*inspect.signature(constructor).parameters}
      if call.place and taken and self.shape == "chain" and depth != wanted:
        raise ValueError(f"{call} drafts {depth} levels, and k = {wanted}")
    if len(built) == 1:
      return built[0]
    (first, _), (other, params) = built
    costs = first.cost or UNKNOWN_COST, other.cost or UNKNOWN_COST
    drafter = drafters.fallback(first, other)
    return Weighted(
      drafter._replace(cost=drafter_cost.fallback(*costs)), params
    )


def load(target: str = shipped.TARGET, **settings) -> Decoder:
  """Loads a target and its drafter; arguments as of `Setup`."""
  return Setup(target, **settings).load()
