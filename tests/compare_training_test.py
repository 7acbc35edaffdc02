"""compare_training: learning curves, joint training, held-out losses."""

import json
import re

import pytest

import programs
from specdec.report import training_runs


def write_files(folder, settings, lines):
  folder.mkdir(parents=True)
  (folder / "run.json").write_text(json.dumps(settings))
  text = "".join(json.dumps(line) + "\n" for line in lines)
  (folder / "metrics.jsonl").write_text(text + '{"step": 50, "ki')
  return folder


def write_drafter_run(folder, steps=(10, 20, 40)):
  """Tokens a pass rise by 0.5 with every evaluation."""
  settings = {"options": {"batch": 2, "sequence": 8}, "decoding": {"k": 3}}
  lines = []
  for i, step in enumerate(steps):
    kept = {"acceptance_1": 0.6 + 0.1 * i, "acceptance_2": 0.4 + 0.1 * i}
    prefix = [0.5 + 0.1 * i, 0.2]
    lines += [
      dict(step=step - 1, kind="train", loss=1.0),
      dict(step=step, kind="held_out", loss=1.0, **kept),
      dict(step=step, kind="decoding", tokens_per_pass=1 + 0.5 * i,
           prefix_acceptance=prefix),
    ]  # fmt: skip
  return write_files(folder, settings, lines)


class TestCurves:
  def test_evaluations_are_points_over_tokens(self, tmp_path):
    curve = training_runs.read_curve(write_drafter_run(tmp_path / "one"))
    assert curve.tokens == (160, 320, 640)
    assert curve.tokens_per_pass == (1.0, 1.5, 2.0)
    assert curve.acceptance == pytest.approx((0.5, 0.6, 0.7))
    assert curve.first == pytest.approx((0.5, 0.6, 0.7))

  @pytest.mark.parametrize(
    "steps, gain",
    [
      ((10, 20, 40), 0.5),
      # 28 lies 0.743 of the way from 10 to 40, on the logarithm.
      ((10, 40, 56), 2.0 - 1.3714),
      ((30, 35, 40), None),
    ],
  )
  def test_gain_of_the_last_doubling(self, tmp_path, steps, gain):
    folder = write_drafter_run(tmp_path / "one", steps)
    curve = training_runs.read_curve(folder)
    assert curve.last_doubling == pytest.approx(gain, abs=1e-3)

  def test_prints_and_plots(self, tmp_path, capsys):
    for name in ("one", "two"):
      write_drafter_run(tmp_path / name)
    picture = tmp_path / "curves.png"
    programs.run("compare_training", f"{tmp_path}/*", f"--picture={picture}")
    table = capsys.readouterr().out
    assert "two" in table and "+0.50" in table
    assert picture.stat().st_size > 10_000

  @pytest.mark.parametrize(
    "name, complaint",
    [
      ("run.json", "not a run of a drafter"),
      ("metrics.jsonl", "not a run of a drafter"),
      (None, "no evaluation yet"),
    ],
  )
  def test_refuses_what_is_no_run(self, tmp_path, name, complaint):
    folder = write_drafter_run(tmp_path / "one", (10,) if name else ())
    if name:
      (folder / name).unlink()
    with pytest.raises(ValueError, match=complaint):
      training_runs.read_curve(folder)
    whole = write_drafter_run(tmp_path / "two")
    curves, [why] = training_runs.read_curves([folder, whole])
    assert [x.name for x in curves] == ["two"] and complaint in why


def write_joint_run(folder, kind, seed, loss, passes=None, **changes):
  options = dict(steps=10, batch=2, sequence=8, eval_sequences=4, seed=seed)
  settings = dict(
    kind=kind,
    options=options | changes.pop("options", {}),
    head_config={"kind": kind} if passes else None,
    layer_skip=None,
    checksums=dict(data=1, held_out=2, first_weights=100 + seed),
  )
  lines = [
    dict(step=5, kind="held_out", loss=9.0),
    dict(step=10, kind="held_out", loss=loss),
  ]
  if passes:
    lines.append(dict(step=10, kind="decoding", tokens_per_pass=passes))
  return write_files(folder, settings | changes, lines)


@pytest.fixture
def joint(tmp_path):
  for seed, loss in enumerate((4.0, 4.1, 4.2)):
    write_joint_run(tmp_path / f"none-{seed}", "none", seed, loss)
  for seed, loss in enumerate((4.1, 4.3, 4.2)):
    folder = tmp_path / f"prophet-{seed}"
    write_joint_run(folder, "prophet", seed, loss, 2.0 + 0.1 * seed)
  return tmp_path


def compare(folder):
  folders = sorted(x for x in folder.iterdir() if x.is_dir())
  return training_runs.compare([training_runs.read_joint(x) for x in folders])


class TestJoint:
  def test_differences_are_seed_by_seed(self, joint):
    write_joint_run(joint / "mtp-7", "mtp", 7, 3.9, 1.5)
    none, mtp, prophet = compare(joint)
    assert [x.kind for x in (none, mtp, prophet)] == ["none", "mtp", "prophet"]
    assert none.loss.value == pytest.approx(4.1)
    assert none.loss.error == pytest.approx(0.1 / 3**0.5)
    assert none.difference.value is None and none.runs[0].tokens == 160
    assert none.tokens_per_pass.value is None
    # .1, .2, 0: mean .1, deviation .1.
    assert prophet.difference.value == pytest.approx(0.1)
    assert prophet.difference.error == pytest.approx(0.1 / 3**0.5)
    assert prophet.tokens_per_pass.value == pytest.approx(2.1)
    # The baseline has no run of its seed; one run has no error.
    assert mtp.difference.value is None and mtp.loss.error is None

  @pytest.mark.parametrize(
    "kind, changes, complaint",
    [
      ("mtp", {"options": {"steps": 20}}, "its log is at step 10 of 20"),
      ("mtp", {"options": {"batch": 4}}, "compared: options.batch: 2 -> 4"),
      (
        "mtp",
        {"options": {"eval_sequences": 8}},
        "options.eval_sequences: 4 -> 8",
      ),
      ("prophet", {}, "have the same kind and seed (prophet, 0)"),
      (
        "prophet",
        {"options": {"seed": 5}, "head_config": {"kind": "prophet", "rank": 9}},
        "head_config.rank: None -> 9",
      ),
      ("mtp", {"options": {"seed": 1}}, "first_weights: "),
    ],
  )
  def test_refuses_unequal_runs(self, joint, kind, changes, complaint):
    write_joint_run(joint / "x", kind, 0, 4.0, 2.0, **changes)
    with pytest.raises(ValueError, match=re.escape(complaint)):
      compare(joint)

  def test_refuses_what_is_no_run(self, joint):
    (joint / "none-0" / "run.json").write_text("{}")
    with pytest.raises(ValueError, match="not a run of joint training"):
      compare(joint)

  def test_prints_and_writes(self, joint, capsys):
    programs.run(
      "compare_training",
      "--show=joint",
      f"{joint}/none-*",
      f"{joint}/prophet-*",
      f"--json={joint / 'out.json'}",
      f"--picture={joint / 'out.svg'}",
    )
    table = capsys.readouterr().out
    loss, difference = "4.2000 ± 0.0577 (n = 3)", "0.1000 ± 0.0577 (n = 3)"
    assert f"prophet  0 1 2  {loss}  {difference}" in table
    assert "2.10 ± 0.06 (n = 3)" in table
    document = json.loads((joint / "out.json").read_text())
    assert document["kinds"][1]["differences"]["1"] == pytest.approx(0.2)
    assert "<svg" in (joint / "out.svg").read_text()


def test_held_out_losses_of_a_model_and_a_trigram(tmp_path, capsys):
  target = programs.write_model(tmp_path, num_layers=1)
  (target / "tokenizer_config.json").write_text('{"eos_token": "z"}')
  text = tmp_path / "text"
  text.write_text("the cat sat on the mat " * 20)
  programs.run(
    "compare_training",
    "--show=losses",
    f"--model={target}",
    f"--held_out={text}",
    f"--data={text}",
    "--sequence=32",
  )
  losses = re.findall(
    r"([\d.]+) nats a token, ([\d.]+) bits a byte", capsys.readouterr().out
  )
  # A random model is no better than a uniform one; an end token is counted.
  model, trigram = ([float(x) for x in row] for row in losses)
  assert model[0] > 3.2 and trigram[0] < 0.5
  assert model[1] == pytest.approx(model[0] / 0.6931 * 461 / 460, rel=2e-3)
