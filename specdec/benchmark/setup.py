"""A way of decoding named by a few words, and the one place that loads it.

  Setup("stdlib-11m", drafter="model(stdlib-1m)", k=3)
  Setup("stdlib-11m", drafter="lookup(k=4) | eagle3(runs/x/best.safetensors)")
  Setup("stdlib-11m", drafter="mine.py:bigram(text=x.txt)", temperature=1.0,
        acceptance="typical(epsilon=0.1)", shape="chains(3)")

A sweep is a list of `dataclasses.replace(setup, ...)`, whose decoders share one
loaded target: `target = setup.load_target()`, then `setup.decoder(target)`.
"""

import dataclasses
import inspect
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from specdec import checkpoints, decode, drafters, sharding
from specdec.benchmark import catalog
from specdec.benchmark.catalog import DRAFTERS
from specdec.benchmark.decoder import Decoder
from specdec.benchmark.settings import Settings
from specdec.benchmark.target import (
  Target,
  Weighted,
  config_of,
  source_of,
  with_cache,
)
from specdec.checkpoints import Checkpoint, Tokenizer, shipped
from specdec.checkpoints import learned as saved
from specdec.compiled import lowering, memory_plan
from specdec.drafters.fallback import Both
from specdec.models import transformer, weight_formats
from specdec.models.config import TransformerConfig
from specdec.models.weight_formats import STORED
from specdec.roofline import drafter_cost
from specdec.types import NO_COST, UNKNOWN_COST, Drafter, Params
from specdec.utils import calls


def silent(text: str) -> None:
  """Reports nothing."""


@dataclasses.dataclass(frozen=True)
class Setup(Settings):
  """One way of decoding; its fields are those of `Settings`."""

  @property
  def identity(self) -> tuple:
    """What decides on the loaded target; a decoder's target must agree."""
    fields = [self.target, self.dtype, self.weights, self.kv]
    fields += [self.num_nodes, self.random_weights, self.mesh]
    if self.random_weights:
      fields.append(self.seed)
    if self.mesh:  # it places the drafter, too
      fields += [self.drafter, self.draft_ways]
    return tuple(fields)

  def check_sources(self) -> None:
    """Refuses what the files of target and drafter say; reads no weights."""
    config = self.target_config()
    self.memory_plan(config, self.places(config))

  def target_config(self) -> TransformerConfig:
    """Reads the config of the target; no weights."""
    source = source_of(self.target)
    held = self.dtype, self.weights, self.kv, self.num_nodes
    return config_of(source, *held)

  def load(self, report: Callable[[str], None] = silent) -> Decoder:
    """Reads the weights and returns the decoder, not yet compiled; reports the
    memory plan and what is loaded.

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
    source = source_of(self.target)
    config = self.target_config()
    form = weight_formats.parse(self.weights)
    if self.random_weights and form and form.kind == STORED:
      raise ValueError("weights = stored: random weights are in no file")
    places = self.places(config)
    plan = self.memory_plan(config, places, num_tokens=num_tokens)
    report(f"each device needs about {plan}")
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
      checkpoint = checkpoints.load(source, self.dtype, place, form)
    config = with_cache(checkpoint.config, self.kv, self.num_nodes)
    checkpoint = dataclasses.replace(checkpoint, config=config)
    fingerprint = None
    heads = any(setup.has_heads for setup in (self, *others))
    if not self.random_weights and heads:
      fingerprint = saved.fingerprint(checkpoint)
    if packed and not places:
      checkpoint = checkpoint.packed()
    return self.target_of(checkpoint, places, fingerprint)

  def target_of(
    self,
    checkpoint: Checkpoint,
    places: sharding.Places | None,
    fingerprint: dict[str, str] | None = None,
    abstract: bool = False,
  ) -> Target:
    """Returns a checkpoint as the target of drafters."""
    return Target(
      transformer.model(checkpoint.config, places and places.target),
      checkpoint,
      self.dtype,
      self.random_weights,
      self.seed,
      places,
      fingerprint,
      self.identity,
      drafts={},
      abstract=abstract,
    )

  def abstract_target(
    self,
    config: TransformerConfig,
    places: sharding.Places | None,
    tokenizer: Tokenizer | None = None,
  ) -> Target:
    """Returns the target without weights; reads and allocates nothing."""
    weights = lowering.weights(config, places and places.target)
    checkpoint = Checkpoint(config, weights, tokenizer, (), self.target)
    return self.target_of(checkpoint, places, abstract=True)

  def places(
    self, config: TransformerConfig, devices=None
  ) -> sharding.Places | None:
    """Returns where target and drafter lie on a mesh of devices, by default all
    of JAX's; None without one. The config is the target's."""
    if self.mesh is None:
      return None
    draft, ways = self._draft_config, self.draft_ways
    counts = draft and draft.counts
    if self.has_heads:
      counts = self.head_config(config).counts
      ways = self.head_ways(config, sharding.parse(self.mesh)["model"])
    return sharding.places(self.mesh, config.counts, counts, ways, devices)

  @property
  def _draft_config(self) -> TransformerConfig | None:
    """The config of the draft model, if there is one."""
    call = self.call_of("model", "pard")
    if call is None:
      return None
    arguments = catalog.arguments_of(call)
    source = source_of(str(arguments["name"]))
    held = arguments["weights"], arguments["kv"]
    return config_of(source, self.dtype, *held)

  def max_length(self, config: TransformerConfig) -> int:
    """Returns L, prompt and output together; of an encoder-decoder, whose
    encoder reads the prompt, the output and its start token."""
    given = 1 if config.encoder_layers else self.prompt_size
    return given + self.max_new_tokens

  def memory_plan(
    self,
    config: TransformerConfig,
    places: sharding.Places | None = None,
    decoder: Decoder | None = None,
    num_tokens: int = 0,
  ) -> memory_plan.Plan:
    """Estimates what decoding needs on each device.

    Args:
      num_tokens: of the largest other pass of the target, a row.
      decoder: whose drafter is planned for as it is; None: nothing is loaded
        yet, and a user's drafter is left out.
    """
    cost = UNKNOWN_COST
    if decoder is not None:
      cost = decoder.drafter_cost
    elif not self.has_user_drafter:
      target = self.abstract_target(config, places)  # refuses what cannot fit
      cost = self.make_drafter(target).drafter.cost or cost
    draft = self._draft_config
    if draft is not None:  # it is planned for by its config
      cost = NO_COST
      draft = dataclasses.replace(draft, vocab_size=config.vocab_size)
    leading = (call.kwargs.get("k", 0) for call in self.drafter_calls)
    return memory_plan.plan(
      config,
      draft,
      batch=self.batch,
      max_length=self.max_length(config),
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
    """Raises MemoryError unless a decoder of loaded weights fits; reports the
    plan of a user's drafter, and any with `again`."""
    plan = self.memory_plan(target.checkpoint.config, target.places, decoder)
    # The first plan was without a user's drafter.
    if report and (again or self.has_user_drafter):
      report(f"each device needs about {plan}")
    place = target.places and target.places.target
    memory_plan.check(plan.excluding_weights, place)

  def decoder(self, target: Target) -> Decoder:
    """Builds the decoder of a loaded target, not yet compiled; refuses one that
    was loaded for another setup."""
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
      self._key(),
      batch=self.batch,
      prompt_size=self.prompt_size,
      max_new_tokens=self.max_new_tokens,
      eos_ids=target.checkpoint.eos_ids,
      temperature=self.temperature,
      top_k=self.top_k,
      top_p=self.top_p,
      places=target.places,
      tokenizer=target.checkpoint.tokenizer,
      start_token=target.checkpoint.config.start_token,
    )

  def _key(self) -> jax.Array:
    """Returns the key of all noise: the seed's.

    A corpus may hold what this seed wrote, so what is copied from it has seen
    that noise. Coupled text is the same for all that; other rules would accept
    it too often (rule 7), so the content of the corpus is mixed in.
    """
    key, call = jax.random.key(self.seed), self.call_of("suffix")
    corpus = catalog.arguments_of(call)["corpus"] if call else None
    if corpus is None or self.make_rule().traversal == "coupled":
      return key
    return jax.random.fold_in(key, jnp.uint32(self.checksums()[corpus]))

  def make_drafter(self, target: Target) -> Weighted:
    """Builds the drafter of a loaded target and reads its weights."""
    if self.k == 0 and self.has_user_drafter:  # who may not know k = 0
      return Weighted(decode.NO_DRAFTER)
    built: list[Weighted] = []
    for number, call in enumerate(self.drafter_calls):
      leading = built[-1].drafter.spec.max_depth if built else 0
      bare, context = self._context(call, target, number, leading)
      constructor = calls.find(call, DRAFTERS, "drafter")
      result = calls.invoke(bare, constructor, context)
      alone = isinstance(result, Drafter) or not isinstance(
        result, list | tuple
      )
      pair = [result] if alone else result
      if len(pair) not in (1, 2) or not isinstance(pair[0], Drafter):
        raise ValueError(
          f"{call} returned {type(result).__name__}; it must be a Drafter, or "
          "a pair of a Drafter and its weights"
        )
      built.append(Weighted(*pair))
      depth, wanted = pair[0].spec.max_depth, context["k"]
      taken = {"k", "shape"} & {*inspect.signature(constructor).parameters}
      if call.place and taken and self.shape == "chain" and depth != wanted:
        raise ValueError(f"{call} drafts {depth} levels, and k = {wanted}")
    if len(built) == 1:
      return built[0]
    (first, held), (other, params) = built
    if held is not None:
      params = Both(held, params)
    costs = first.cost or UNKNOWN_COST, other.cost or UNKNOWN_COST
    drafter = drafters.fallback(first, other)
    return Weighted(
      drafter._replace(cost=drafter_cost.fallback(*costs)), params
    )


def load(target: str = shipped.TARGET, **settings) -> Decoder:
  """Loads a target and its drafter; arguments as of `Setup`."""
  return Setup(target, **settings).load()
