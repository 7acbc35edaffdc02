"""Training: data in order, losses by hand, runs that resume bit for bit."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec import acceptance, drafters
from specdec.models import transformer
from specdec.models.config import TransformerConfig
from specdec.training import (
  data,
  evaluate,
  log,
  loop,
  losses,
  objective,
  run,
  samples,
  saving,
)
from specdec.training.options import Options

CONFIG = TransformerConfig(
  vocab_size=17,
  num_layers=1,
  width=8,
  mlp_width=12,
  num_heads=2,
  num_kv_heads=1,
  head_dim=4,
  tied=True,
)
OPTIONS = Options(
  steps=12,
  batch=4,
  sequence=6,
  warmup=2,
  log_every=1,
  eval_every=4,
  save_every=3,
  eval_sequences=8,
)


def params(seed=0):
  return transformer.init_params(CONFIG, jax.random.key(seed))


def stream(size=200, seed=0):
  # Every token says much about the next: there is something to learn.
  rng = np.random.default_rng(seed)
  steps = rng.choice([1, 2], size, p=[0.9, 0.1])
  return (np.cumsum(steps) % CONFIG.vocab_size).astype(np.int32)


def packed(seed=0):
  return data.Packed(stream(seed=seed), OPTIONS.sequence)


def assert_equal(left, right):
  jax.tree.map(np.testing.assert_array_equal, left, right)


class TestData:
  def test_reads_a_folder_in_order(self, tmp_path):
    (tmp_path / "b.txt").write_text("two")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.py").write_text("one")
    (tmp_path / ".hidden").write_text("no")
    (tmp_path / "empty.txt").write_text("  \n")
    (tmp_path / "c.bin").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "d.jsonl").write_text('{"text": "three"}\n\n{"text": "four"}\n')
    found = [tuple(document) for document in data.read(tmp_path)]
    assert found == [
      ("a/x.py", "one"),
      ("b.txt", "two"),
      ("d.jsonl:1", "three"),
      ("d.jsonl:3", "four"),
    ]

  @pytest.mark.parametrize(
    "content, complaint",
    [
      ("[1]\n", "line 1 of .* has no `text`"),
      ('{"text": 3}\n', "line 1 of .* has no `text`"),
      ('{"text": "a"}\n{', "line 2 of .* is not JSON"),
      ("\n", "holds no text"),
    ],
  )
  def test_refuses(self, tmp_path, content, complaint):
    path = tmp_path / "x.jsonl"
    path.write_text(content)
    with pytest.raises(ValueError, match=complaint):
      data.read(path)

  def test_empty_and_absent(self, tmp_path):
    with pytest.raises(ValueError, match="holds no text"):
      data.read(tmp_path)
    with pytest.raises(FileNotFoundError, match="does not exist"):
      data.read(tmp_path / "no")

  def test_shorter_than_a_sequence(self):
    with pytest.raises(ValueError, match="7 tokens; one sequence takes 8"):
      data.Packed(np.arange(7), 7)
    one = data.Packed(np.arange(8), 7)
    np.testing.assert_array_equal(one.batch(3, 2), [np.arange(8)] * 2)

  def test_an_epoch_serves_every_sequence_once(self):
    tokens = np.arange(100)
    cut = data.Packed(tokens, 7, seed=3)
    for epoch in range(3):
      rows = np.concatenate(
        [cut.batch(epoch * cut.count + i, 1) for i in range(cut.count)]
      )
      starts = np.sort(rows[:, 0])
      np.testing.assert_array_equal(np.diff(starts), 7)  # no overlap, no gap
      np.testing.assert_array_equal(rows, rows[:, :1] + np.arange(8))

  def test_order_depends_on_step_and_seed_alone(self):
    one, other = packed(), packed()
    late = other.batch(40, 4)  # without having asked for those before
    for step in range(41):
      batch = one.batch(step, 4)
    np.testing.assert_array_equal(batch, late)
    assert not np.array_equal(one.batch(0, 4), one.batch(1, 4))
    reseeded = data.Packed(stream(), OPTIONS.sequence, seed=1)
    assert not np.array_equal(one.batch(0, 4), reseeded.batch(0, 4))

  def test_held_out_is_spread(self):
    rows = data.Packed(np.arange(101), 10).spread(3)
    np.testing.assert_array_equal(rows[:, 0], [0, 40, 90])


class TestLosses:
  P = np.array([0.5, 0.25, 0.25, 0.0])
  Q = np.array([0.25, 0.5, 0.125, 0.125])

  @pytest.mark.parametrize(
    "loss, value",
    [
      # Of Q against P: half of .25 + .25 + .125 + .125; sums of p log(p / q).
      (losses.total_variation, 0.375),
      (
        losses.forward_kl,
        0.5 * np.log(2) - 0.25 * np.log(2) + 0.25 * np.log(2),
      ),
    ],
  )
  def test_by_hand(self, loss, value):
    with np.errstate(divide="ignore"):
      found = loss(jnp.log(self.Q), jnp.log(self.P))
    np.testing.assert_allclose(found, value, rtol=1e-6)

  def test_reverse_kl_is_forward_kl_turned_around(self):
    p, q = jnp.log(self.Q[:3] / 0.875), jnp.log(self.P[:3])
    np.testing.assert_allclose(
      losses.reverse_kl(p, q), losses.forward_kl(q, p), rtol=1e-6
    )

  def test_reverse_kl_forbids_what_the_target_never_says(self):
    assert losses.reverse_kl(jnp.log(self.Q), jnp.log(self.P)) == jnp.inf

  def test_cross_entropy(self):
    law = jnp.log(jnp.array([self.P, self.Q]))
    found = losses.cross_entropy(law, jnp.array([1, 0]))
    np.testing.assert_allclose(found, [np.log(4), np.log(4)], rtol=1e-6)

  @pytest.mark.parametrize("name", sorted(losses.DISTANCES))
  def test_equal_laws_are_at_no_distance(self, name):
    law = jax.nn.log_softmax(jax.random.normal(jax.random.key(0), (5, 7)))
    value, slope = jax.value_and_grad(
      lambda x: losses.DISTANCES[name](jax.nn.log_softmax(x), law).sum()
    )(law)
    np.testing.assert_allclose(value, 0, atol=1e-6)
    if name != "total_variation":  # |x| has a slope on either side of 0
      np.testing.assert_allclose(slope, 0, atol=1e-6)


class TestStep:
  def test_accumulated_pieces_are_one_batch(self):
    model = transformer.model(CONFIG)
    batch = jnp.asarray(packed().batch(0, 4))
    results = []
    for pieces in (1, 2, 4):
      options = Options(
        steps=9, batch=4, sequence=6, warmup=2, accumulate=pieces
      )
      optimizer = loop.make_optimizer(options)
      step = loop.make_step(objective.language_model(model), optimizer, options)
      results.append(step(loop.init(params(), optimizer), None, batch))
    for state, measures in results[1:]:
      jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5),
        (state.params, measures),
        (results[0][0].params, results[0][1]),
      )

  @pytest.mark.parametrize("optimizer", ["adamw", "muon"])
  @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
  def test_learns(self, optimizer, dtype):
    options = Options(
      steps=60,
      batch=8,
      sequence=6,
      warmup=5,
      optimizer=optimizer,
      learning_rate=0.02,
      dtype=dtype,
    )
    update = loop.make_optimizer(options)
    step = loop.make_step(
      objective.language_model(transformer.model(CONFIG)), update, options
    )
    state = loop.init(params(), update)
    batches = packed()
    losses = []
    for i in range(options.steps):
      state, measures = step(state, None, jnp.asarray(batches.batch(i, 8)))
      losses.append(float(measures["loss"]))
    assert losses[0] > 2.5 and np.mean(losses[-5:]) < 1.2
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(state.params))

  def test_a_step_that_is_not_finite_changes_no_weight(self):
    optimizer = loop.make_optimizer(OPTIONS)

    def poisoned(weights, frozen, tokens):
      del frozen
      value = jnp.sum(weights["embed"]["weight"])
      return jnp.where(tokens[0, 0] == 3, jnp.nan, value), {}

    step = loop.make_step(poisoned, optimizer, OPTIONS)
    state = loop.init(params(), optimizer)
    before = jax.tree.map(np.array, (state.params, state.opt_state))
    state, _ = step(state, None, jnp.full((4, 7), 3))
    assert_equal(before, (state.params, state.opt_state))
    assert (int(state.step), int(state.failed)) == (1, 1)
    state, _ = step(state, None, jnp.zeros((4, 7), int))
    assert (int(state.step), int(state.failed)) == (2, 1)  # not forgotten
    state, _ = step(state, None, jnp.full((4, 7), 3))
    assert int(state.failed) == 1


class Killed(BaseException):
  """Stands for a kill: nothing catches it."""


def train(folder, kill_at=None, aim=None, exported=None):
  batches = packed()
  if kill_at is not None:
    serve = batches.batch

    def batch(step, size):
      if step == kill_at:
        raise Killed
      return serve(step, size)

    batches.batch = batch
  exported = {} if exported is None else exported
  return run.train(
    params(),
    None,
    aim or objective.language_model(transformer.model(CONFIG)),
    batches,
    packed(seed=1),
    OPTIONS,
    folder,
    export=lambda weights, name: exported.update(
      {name: jax.tree.map(np.array, weights)}
    ),
  )


def curves(folder):
  lines = (folder / "metrics.jsonl").read_text().splitlines()
  return [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
  folder = tmp_path_factory.mktemp("whole")
  exported = {}
  return train(folder, exported=exported), curves(folder), exported


class TestRun:
  # Before the first checkpoint, right after one, before an evaluation.
  @pytest.mark.parametrize("at", [[2], [6], [7], [3, 5, 11]])
  def test_resumes_bit_for_bit(self, tmp_path, whole, at):
    for step in at:
      with pytest.raises(Killed):
        train(tmp_path, kill_at=step)
    exported = {}
    weights = train(tmp_path, exported=exported)
    assert curves(tmp_path) == whole[1]
    assert_equal(weights, whole[0])
    assert_equal(exported["last"], whole[2]["last"])

  def test_exports_the_best(self, whole):
    held_out = [x["loss"] for x in whole[1] if x["kind"] == "held_out"]
    assert len(held_out) == 3 and held_out[-1] == min(held_out)
    assert_equal(whole[2]["best"], whole[0])

  def test_tensorboard_reads_it(self, tmp_path):
    train(tmp_path)
    (file,) = (tmp_path / "tensorboard").iterdir()
    assert b"held_out/loss" in file.read_bytes()

  @pytest.mark.parametrize("damage", ["cut", "empty", "gone"])
  def test_a_damaged_checkpoint_gives_way(
    self, tmp_path, whole, capsys, damage
  ):
    with pytest.raises(Killed):
      train(tmp_path, kill_at=10)
    for file in (tmp_path / "checkpoints" / "9").rglob("*"):
      if not file.is_file():
        continue
      if damage == "gone":
        file.unlink()
      else:
        kept = file.stat().st_size // 2 if damage == "cut" else 0
        file.write_bytes(file.read_bytes()[:kept])
    weights = train(tmp_path)
    said = capsys.readouterr().err
    assert "checkpoint 9 is unusable" in said and "after step 6" in said
    assert_equal(weights, whole[0])
    assert curves(tmp_path) == whole[1]

  def test_nothing_left_to_go_on_from(self, tmp_path):
    with pytest.raises(Killed):
      train(tmp_path, kill_at=7)
    for file in (tmp_path / "checkpoints").rglob("*"):
      if file.is_file():
        file.write_bytes(b"")
    with pytest.raises(ValueError, match="no checkpoint under"):
      train(tmp_path)

  def test_half_written_checkpoint_is_no_checkpoint(self, tmp_path, whole):
    with pytest.raises(Killed):
      train(tmp_path, kill_at=7)
    half = tmp_path / "checkpoints" / "9.orbax-checkpoint-tmp"
    half.mkdir()
    (half / "default").write_bytes(b"...")
    assert_equal(train(tmp_path), whole[0])

  def test_nan_stops_and_names_the_step(self, tmp_path):
    plain = objective.language_model(transformer.model(CONFIG))
    bad = packed().batch(7, 4)

    def aim(weights, frozen, tokens):
      loss, measures = plain(weights, frozen, tokens)
      hit = jnp.all(tokens == jnp.asarray(bad))
      return jnp.where(hit, jnp.nan, loss), measures

    with pytest.raises(run.NotFinite, match="not finite at step 8"):
      train(tmp_path, aim=aim)
    left = sorted(int(x.name) for x in (tmp_path / "checkpoints").iterdir())
    assert left == [3, 6]


class TestClaim:
  def test_lists_what_differs(self, tmp_path):
    before = {"data": "a", "options": {"steps": 3, "log_every": 1}}
    saving.claim(tmp_path / "run", before)
    saving.claim(tmp_path / "run", before)
    now = {"data": "a", "options": {"steps": 4, "log_every": 2}}
    with pytest.raises(ValueError, match=r"\(options.steps: 3 -> 4\)"):
      saving.claim(tmp_path / "run", now)
    # How a run is watched may change.
    now["options"]["steps"] = 3
    saving.claim(tmp_path / "run", now)

  def test_log_drops_what_will_come_again(self, tmp_path):
    first = log.Log(tmp_path, 0)
    for step in (1, 2, 3):
      first.write(step, "held_out", {"loss": 4.0 - step})
    first.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
      file.write('{"step": 4, "ki')
    again = log.Log(tmp_path, 2)
    again.close()
    assert again.lowest == 2.0
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


@pytest.mark.parametrize(
  "change, complaint",
  [
    ({"steps": 0}, "steps = 0"),
    ({"accumulate": 3}, "does not divide"),
    ({"warmup": 12}, "warmup = 12"),
    ({"optimizer": "sgd"}, "known: adamw, muon"),
    ({"dtype": "float16"}, "known: float32, bfloat16"),
  ],
)
def test_options_refuse(change, complaint):
  with pytest.raises(ValueError, match=complaint):
    Options(**({"steps": 12, "batch": 4, "sequence": 6, "warmup": 2} | change))


class TestDistillation:
  DRAFT = TransformerConfig(
    vocab_size=17,
    num_layers=1,
    width=4,
    mlp_width=8,
    num_heads=1,
    num_kv_heads=1,
    head_dim=4,
  )

  def test_the_target_itself_is_accepted_always(self):
    model = transformer.model(CONFIG)
    aim = objective.distillation(model, model, "forward_kl")
    loss, measures = aim(params(), params(), jnp.asarray(packed().batch(0, 4)))
    np.testing.assert_allclose(loss, 0, atol=1e-6)
    np.testing.assert_allclose(measures["acceptance"], 1, atol=1e-6)
    assert measures["agreement"] == 1

  @pytest.mark.parametrize("loss", ["cross_entropy", *sorted(losses.DISTANCES)])
  def test_comes_nearer_to_the_target(self, loss):
    target = jax.tree.map(lambda x: 8 * x, params(1))  # sharp laws
    options = Options(
      steps=150, batch=8, sequence=6, warmup=5, learning_rate=0.05
    )
    optimizer = loop.make_optimizer(options)
    aim = objective.distillation(
      transformer.model(self.DRAFT), transformer.model(CONFIG), loss
    )
    step = loop.make_step(aim, optimizer, options)
    draft = transformer.init_params(self.DRAFT, jax.random.key(2))
    state = loop.init(draft, optimizer)
    batches, measured = packed(), []
    for i in range(options.steps):
      state, measures = step(state, target, jnp.asarray(batches.batch(i, 8)))
      measured.append({name: float(x) for name, x in measures.items()})
    first, last = measured[0], measured[-1]
    assert last["loss"] < 0.8 * first["loss"]
    if loss != "cross_entropy":
      assert last["acceptance"] > first["acceptance"] + 0.1
      assert last["agreement"] > first["agreement"]

  def test_unknown_loss(self):
    model = transformer.model(CONFIG)
    with pytest.raises(ValueError, match="known: cross_entropy, forward_kl"):
      objective.distillation(model, model, "hinge")

  @pytest.mark.parametrize("temperature", [0.0, 1.0])
  def test_judged_by_decoding(self, temperature):
    model = transformer.model(CONFIG)
    measure = evaluate.by_decoding(
      model,
      drafters.model(model, 3),
      acceptance.rejection(),
      params(),
      packed().spread(4)[:, :5],
      new_tokens=12,
      temperature=temperature,
    )
    same = measure(params())
    assert same["acceptance_by_position"] == [1.0, 1.0, 1.0]
    assert same["tokens_per_pass"] == 4
    other = measure(jax.tree.map(lambda x: -60 * x, params()))
    assert other["tokens_per_pass"] < 4

  def test_samples_are_the_targets_own_and_resume(self, tmp_path):
    model = transformer.model(CONFIG)
    prompts = packed().batch(0, samples.PIECE * 2 + 3)[:, :3]
    texts = samples.sample(model, params(), prompts, 9, tmp_path, temperature=0)
    assert texts.shape == (2 * samples.PIECE, 9)
    np.testing.assert_array_equal(texts[:, :3], prompts[: len(texts)])
    logits = model.apply(params(), jnp.asarray(texts), None)[0].logits
    np.testing.assert_array_equal(
      np.argmax(logits[:, 2:-1], axis=-1), texts[:, 3:]
    )
    (tmp_path / "00000016.npy").unlink()
    marked = np.load(tmp_path / "00000000.npy") + 1
    np.save(tmp_path / "00000000.npy", marked)
    again = samples.sample(model, params(), prompts, 9, tmp_path, temperature=0)
    np.testing.assert_array_equal(again[: samples.PIECE], marked)  # kept
    np.testing.assert_array_equal(
      again[samples.PIECE :], texts[samples.PIECE :]
    )
