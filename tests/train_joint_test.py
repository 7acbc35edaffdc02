"""train_joint and compare_joint, on a tiny target."""

import json
import re

import jax
import numpy as np
import pytest

import programs
from specdec import acceptance, checkpoints, decode, draft_shape, sampling
from specdec.checkpoints import learned as saved
from specdec.drafters.heads import draft_head as draft_heads
from specdec.drafters.heads import serve
from specdec.models import transformer
from specdec.training import joint_runs
from specdec.types import Params
from tiny_training import run_killed, write_config

MODEL = dict(
  vocab_size=32,
  num_layers=3,
  width=16,
  mlp_width=24,
  num_heads=2,
  num_kv_heads=1,
  head_dim=8,
  tied=True,
)
OPTIONS = dict(
  steps=12,
  batch=4,
  sequence=16,
  warmup=2,
  log_every=1,
  eval_every=6,
  save_every=4,
  eval_sequences=4,
)
DECODING = dict(k=2, prompts=4, length=8, new_tokens=8, temperature=0.0)
NET = dict(
  num_layers=1, width=16, mlp_width=24, num_heads=2, head_dim=8, head="shared"
)
PROPHET = dict(
  head_config=dict(kind="prophet", levels=2, **NET),
  loss=dict(divergence="cross_entropy", token_weight=1.0, decay=1.0),
)
SKIP = dict(
  layer_skip=dict(dropout=0.5, exit_scale=0.2, rotation=2),
  decoding=DECODING | dict(exit_layer=1),
)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
  """A folder with text and a tokenizer of single letters."""
  folder = tmp_path_factory.mktemp("place")
  programs.write_model(folder / "letters")
  config = folder / "letters" / "tokenizer_config.json"
  config.write_text(json.dumps({"eos_token": "z"}))
  (folder / "text").mkdir()
  for name in "ab":
    text = "".join(f"the cat {name * (i % 5)} sat on a mat " for i in range(60))
    (folder / "text" / f"{name}.txt").write_text(text)
  return folder


def entries(place, **changes):
  shared = dict(
    tokenizer=str(place / "letters"),
    data=str(place / "text"),
    held_out=str(place / "text" / "b.txt"),
    model=MODEL,
    options=OPTIONS,
    decoding=DECODING,
  )
  return shared | changes


@pytest.fixture(scope="module")
def prophet(place):
  config = write_config(place / "prophet.py", **entries(place, **PROPHET))
  folder = place / "prophet-0"
  programs.run("train_joint", config, f"--folder={folder}")
  return folder


def log(folder, kind):
  lines = (folder / "metrics.jsonl").read_text().splitlines()
  return [x for x in map(json.loads, lines) if x["kind"] == kind]


def test_what_it_leaves_behind_decodes_together(prophet):
  train, evaluated = log(prophet, "train"), log(prophet, "held_out")
  for entry in train:
    loss = entry["cross_entropy"] + entry["auxiliary"]
    assert entry["loss"] == pytest.approx(loss, rel=1e-5)
  assert [x["step"] for x in evaluated] == [6, 12]
  assert all(x["loss"] == x["cross_entropy"] for x in evaluated)
  assert evaluated[-1]["loss"] < train[0]["cross_entropy"]
  assert 0 <= evaluated[-1]["acceptance_2"] <= 1
  decoded = log(prophet, "decoding")[-1]
  assert 1 <= decoded["tokens_per_pass"] <= DECODING["k"] + 1
  weights = []
  for name in ("best", "last"):
    target = checkpoints.load(prophet / name)
    learned = saved.load(prophet / name / "drafter.safetensors", target)
    weights.append((target.params, learned.net))
  jax.tree.map(np.testing.assert_array_equal, *weights)  # the end was the best
  model = transformer.model(target.config)
  draft_head = learned.draft_head(target.config)
  prompt = np.full((2, 3), 5)
  state = decode.generate(
    model,
    serve.drafter(draft_head, model, draft_shape.chain(2)),
    acceptance.coupled(),
    Params(
      target.params,
      draft_heads.weights_of(draft_head, learned.net, target.params),
    ),
    prompt,
    np.full(2, 3),
    jax.random.key(0),
    max_length=12,
    sampling=sampling.settings(2, 0.0),
  )
  text = np.asarray(state.tokens)
  logits, _ = model.apply(target.params, text, None)
  baseline = np.argmax(np.asarray(logits.logits), axis=-1)
  np.testing.assert_array_equal(text[:, 3:], baseline[:, 2:-1])


def test_another_target_is_not_its_own(prophet, place):
  other = checkpoints.load(programs.write_model(place / "other", seed=3))
  with pytest.raises(ValueError, match="trained for another target"):
    saved.load(prophet / "best" / "drafter.safetensors", other)


def test_layer_skip_drafts_with_its_first_layers(place):
  config = write_config(place / "skip.py", **entries(place, **SKIP))
  folder = place / "layerskip-0"
  programs.run("train_joint", config, f"--folder={folder}")
  evaluated, decoded = (log(folder, x)[-1] for x in ("held_out", "decoding"))
  assert evaluated["exit_1"] > 0 and "exit_3" not in evaluated
  assert decoded["tokens_per_pass"] >= 1
  assert not list(folder.rglob("drafter.safetensors"))


@pytest.mark.parametrize(
  "changes, complaint",
  [
    (PROPHET | SKIP, "sets head_config and layer_skip"),
    (dict(loss=PROPHET["loss"]), "and no head_config"),
    (dict(head_config=PROPHET["head_config"]), "the config lacks loss"),
    (SKIP | dict(decoding=DECODING), "the config lacks decoding.exit_layer"),
    (dict(speed="high"), "the config sets speed; accepted: tokenizer, "),
    (
      PROPHET | dict(loss=dict(divergence="forward_kl")),
      "joint training needs divergence",
    ),
    (
      SKIP | dict(model=MODEL | dict(num_layers=1)),
      "1 layers; an early exit needs at least 2",
    ),
    (dict(model=MODEL | dict(vocab_size=8)), "needs a row for each"),
    (SKIP | dict(layer_skip=dict(p_max=0.1)), "p_max"),
    (dict(model=MODEL | dict(dtype="bfloat16")), "trained in float32"),
  ],
)
def test_refuses_before_it_begins(place, changes, complaint):
  config = write_config(place / "bad.py", **entries(place, **changes))
  with pytest.raises(SystemExit, match=re.escape(complaint)):
    programs.run("train_joint", config, f"--folder={place / 'bad'}")
  assert not (place / "bad").exists()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["prophet", "layerskip"])
def test_killed_it_ends_with_the_same_weights(place, kind):
  changes = PROPHET if kind == "prophet" else SKIP
  changes = changes | dict(options=OPTIONS | dict(steps=60, save_every=7))
  config = write_config(place / f"{kind}.py", **entries(place, **changes))
  whole, killed = (place / f"{kind}-{x}" for x in ("whole", "killed"))
  programs.run("train_joint", config, f"--folder={whole}")
  run_killed("train_joint", config, killed, 20)
  programs.run("train_joint", config, f"--folder={killed}")
  files = ["metrics.jsonl", "last/model.safetensors", "best/config.json"]
  if kind == "prophet":
    files += ["last/drafter.safetensors", "best/drafter.safetensors"]
  for name in files:
    assert (whole / name).read_bytes() == (killed / name).read_bytes(), name


def write_run(folder, kind, seed, loss, passes=None, **options):
  """A finished run, as train_joint.py leaves it."""
  folder.mkdir(parents=True)
  settings = dict(
    kind=kind,
    options=dict(steps=10, batch=2, sequence=8, eval_sequences=4, seed=seed),
    head_config={"kind": kind} if passes else None,
    layer_skip=None,
    checksums=dict(data=1, held_out=2, first_weights=100 + seed),
  )
  settings["options"] |= options
  lines = [
    dict(step=5, kind="held_out", loss=9.0),
    dict(step=10, kind="held_out", loss=loss),
  ]
  if passes:
    lines.append(dict(step=10, kind="decoding", tokens_per_pass=passes))
  (folder / "run.json").write_text(json.dumps(settings))
  text = "".join(json.dumps(line) + "\n" for line in lines)
  (folder / "metrics.jsonl").write_text(text)


@pytest.fixture
def runs(tmp_path):
  for seed, loss in enumerate((4.0, 4.1, 4.2)):
    write_run(tmp_path / f"none-{seed}", "none", seed, loss)
  for seed, loss in enumerate((4.1, 4.3, 4.2)):
    write_run(
      tmp_path / f"prophet-{seed}", "prophet", seed, loss, 2.0 + 0.1 * seed
    )
  return tmp_path


def read(folder):
  return [joint_runs.read(x) for x in sorted(folder.iterdir()) if x.is_dir()]


class TestCompare:
  def test_differences_are_seed_by_seed(self, runs):
    write_run(runs / "mtp-7", "mtp", 7, 3.9, 1.5)
    none, mtp, prophet = joint_runs.compare(read(runs))
    assert [x.name for x in (none, mtp, prophet)] == ["none", "mtp", "prophet"]
    assert none.loss.value == pytest.approx(4.1)
    assert none.loss.error == pytest.approx(0.1 / 3**0.5)
    assert none.difference.value is None and none.runs[0].tokens == 160
    assert none.tokens_per_pass.value is None
    # .1, .2, 0: mean .1, deviation .1.
    assert prophet.difference.value == pytest.approx(0.1)
    assert prophet.difference.error == pytest.approx(0.1 / 3**0.5)
    assert prophet.tokens_per_pass.value == pytest.approx(2.1)
    # No seed of its own among the baseline's; one run has no error.
    assert mtp.difference.value is None and mtp.loss.error is None

  @pytest.mark.parametrize(
    "options, complaint",
    [
      (dict(steps=20), "is not finished: its log is at step 10 of 20"),
      (dict(batch=4), "cannot be compared: options.batch: 4 -> 2"),
      (dict(eval_sequences=8), "options.eval_sequences: 8 -> 4"),
    ],
  )
  def test_refuses_unequal_runs(self, runs, options, complaint):
    write_run(runs / "mtp-0", "mtp", 0, 4.0, **options)
    with pytest.raises(ValueError, match=complaint):
      joint_runs.compare(read(runs))

  def test_refuses_what_is_no_comparison(self, runs):
    write_run(runs / "prophet-again", "prophet", 0, 4.0, 2.0)
    with pytest.raises(ValueError, match="have the same kind and seed"):
      joint_runs.compare(read(runs))
    path = runs / "prophet-again" / "run.json"
    settings = json.loads(path.read_text())
    settings["options"]["seed"] = 5
    settings["head_config"]["levels"] = 9
    path.write_text(json.dumps(settings))
    with pytest.raises(ValueError, match=r"head_config\.levels: None -> 9"):
      joint_runs.compare(read(runs))
    settings["head_config"].pop("levels")
    settings["options"]["seed"], settings["kind"] = 1, "mtp"
    path.write_text(json.dumps(settings))
    with pytest.raises(ValueError, match="first_weights: 101 -> 100"):
      joint_runs.compare(read(runs))
    path.write_text("{}")
    with pytest.raises(ValueError, match=r"not a run of train_joint\.py"):
      read(runs)
    with pytest.raises(ValueError, match="no runs"):
      joint_runs.compare([])

  def test_prints_and_writes(self, runs, capsys):
    programs.run(
      "compare_joint",
      f"{runs}/none-*",
      f"{runs}/prophet-*",
      f"--json={runs / 'out.json'}",
      f"--picture={runs / 'out.svg'}",
    )
    table = capsys.readouterr().out
    assert "prophet  0 1 2  4.2000 ± 0.0577  0.1000 ± 0.0577" in table
    assert "2.10 ± 0.06" in table
    document = json.loads((runs / "out.json").read_text())
    assert document["kinds"][1]["differences"]["1"] == pytest.approx(0.2)
    assert "<svg" in (runs / "out.svg").read_text()

  def test_names_what_is_not_there(self, runs):
    with pytest.raises(SystemExit, match="names no folder"):
      programs.run("compare_joint", f"{runs}/absent-*")
