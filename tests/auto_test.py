"""--k=auto: what pays by the costs and the first rounds, 0 included; and
--k=adaptive, which takes the same costs into the loop."""

import json
import re
import shutil

import numpy as np
import pytest

import programs
from specdec.benchmark import calibrated, deployments, provenance, timing
from specdec.benchmark.decoder import Decoder
from specdec.benchmark.setup import Setup
from specdec.drafters.heads.head_config import HeadConfig
from specdec.roofline import hardware


@pytest.fixture(scope="module")
def costs():
  """Passes and rounds take what the test states, by number of tokens."""
  stated = {"slope": 0.0, "wide": 0.0}

  def seconds(batch, tokens):
    return 1e-3 * (1 + stated["slope"] * (batch * tokens - 1))

  def pass_timer(model, params, batch, tokens, *_):
    return lambda: seconds(batch, tokens)

  def round_timer(decoder, rows):
    wide = stated["wide"] * (decoder.num_nodes > 3)  # than other kernels take
    return lambda: seconds(decoder.batch, decoder.num_nodes) + wide

  with pytest.MonkeyPatch.context() as patch:
    programs.fake_machine(patch)
    patch.setattr(timing, "pass_timer", pass_timer)
    patch.setattr(timing, "round_timer", round_timer)
    yield stated


def generate(target, calibration, *arguments, prompt="abababababababab"):
  programs.run(
    "generate", f"--target={target}",
    *([f"--prompt={prompt}"] if prompt else []), "--k=auto",
    "--drafter=lookup(min_ngram=1)", "--max_new_tokens=24", "--color=never",
    f"--calibration={calibration}", "--most_k=2", *arguments,
  )  # fmt: skip


@pytest.fixture(scope="module")
def first_run(target, costs, tmp_path_factory):
  """The calibration of a run that says what it waits for."""
  path = tmp_path_factory.mktemp("first") / "calibration.json"
  with programs.waits() as waits:
    generate(target, path)
  assert waits[0].startswith("timing this machine, once (kept in ")
  assert waits[1] == "compiling k = 2 and trying it for 64 rounds"
  return path


@pytest.fixture
def calibration(first_run, tmp_path):
  """A copy of the first run's calibration."""
  return shutil.copy(first_run, tmp_path / "calibration.json")


def test_free_draft_tokens_are_taken_and_dear_ones_are_not(
  target, costs, tmp_path, capsys
):
  paths = tmp_path / "free.json", tmp_path / "dear.json"
  generate(target, paths[0], "--acceptance=synthetic(0.9)", "--most_k=4")
  printed = capsys.readouterr().out
  assert "k = 4, " in printed
  assert "times autoregressive decoding expected" in printed
  assert "speedup expected" in printed
  kept = json.loads(paths[0].read_text())
  assert len(kept["fits"]) == 1 and len(kept["overhead"]) == 1
  with pytest.MonkeyPatch.context() as patch:
    patch.setitem(costs, "slope", 1.0)  # every token costs a pass
    generate(target, paths[1], "--acceptance=synthetic(0.2)", "--most_k=4")
  assert "k = 0: no draft token pays here" in capsys.readouterr().out


def test_rounds_are_priced_by_the_times_of_their_own_width(
  target, costs, tmp_path, capsys
):
  """No line through k = 1 and k = 4 knows where other kernels take over."""
  arguments = "--acceptance=synthetic(0.9)", "--most_k=4"
  with pytest.MonkeyPatch.context() as patch:
    patch.setitem(costs, "wide", 1e-3)
    path = tmp_path / "jump.json"
    generate(target, path, *arguments)
    printed = capsys.readouterr().out
    assert "k = 2, " in printed, printed
    generate(target, path, *arguments, "--k=adaptive")
  shown = re.search(r"costs=\[(.*?)\]", capsys.readouterr().out)[1]
  table = [float(cost) for cost in shown.split(", ")]
  assert [*table[:3], table[4]] == pytest.approx([1.0, 1.0, 1.0, 2.0], abs=0.01)


@pytest.mark.parametrize("k", ["auto", "adaptive"])
def test_what_decides_k_has_not_seen_the_noise_that_writes(
  k, target, calibration, monkeypatch
):
  """Else rules with noise of their own are not lossless: the test of a k chosen
  by a pilot run in decode_distribution_test shows by how much."""
  keys = {"first_rounds": [], "decode": []}
  for name, used in keys.items():
    honest = getattr(Decoder, name)

    def spy(self, *args, honest=honest, used=used, **options):
      used.append(self.key)
      return honest(self, *args, **options)

    monkeypatch.setattr(Decoder, name, spy)
  sampled = "--acceptance=rejection", "--temperature=1"
  generate(target, calibration, *sampled, f"--k={k}")
  [pilot], writing = keys["first_rounds"], keys["decode"]
  assert writing
  for key in writing:
    assert not programs.keys_of(pilot) & programs.keys_of(key)


def test_a_calibration_is_kept_and_explained(
  target, calibration, monkeypatch, capsys
):
  def never(*_):
    raise AssertionError("timed again")

  monkeypatch.setattr(timing, "pass_timer", never)
  generate(target, calibration, "--explain")
  printed = capsys.readouterr().out
  for words in ("tokens/pass", "weights", "KV read", "round overhead"):
    assert words in printed
  for k in ("2", "adaptive"):
    with pytest.raises(SystemExit, match=r"--explain is for --k=auto$"):
      generate(target, calibration, "--explain", f"--k={k}")
  monkeypatch.setattr(hardware, "device_name", lambda: "another chip")
  with pytest.raises(SystemExit, match=r"no speed .* and this is another chip"):
    generate(target, calibration)
  for damaged in (b"{", b"\xff\xfe", b"[" * 100_000):
    calibration.write_bytes(damaged)
    with pytest.raises(SystemExit, match=r"calibration.json: .*delete it"):
      generate(target, calibration)


def test_a_busy_machine_is_named_before_it_is_timed(
  target, costs, tmp_path, monkeypatch, capsys
):
  path = tmp_path / "new.json"
  for busy, named in ((1.4, True), (0.1, False), (None, False)):
    path.unlink(missing_ok=True)
    monkeypatch.setattr(provenance, "busy_cores", lambda _, busy=busy: busy)
    generate(target, path)
    printed = "".join(capsys.readouterr())
    assert ("others keep 1.4 cores busy" in printed) == named
    assert (f"delete {path}" in printed) == named


def batches_timed(path) -> set[int]:
  [fit] = calibrated.read(path).overhead.values()
  return {r.batch for r in fit.times}


def test_a_batch_is_priced_by_rounds_of_about_its_size(
  target, costs, calibration, tmp_path
):
  """What a round of 8 rows adds to its passes is not what one of 1 does."""
  assert batches_timed(calibration) == {1}
  first = calibrated.read(calibration).fits
  prompts = tmp_path / "p.jsonl"
  prompts.write_text('{"prompt": "abab"}\n' * 8)
  other = tmp_path / "other.json"
  for path in (calibration, other):
    many = f"--prompt_file={prompts}", "--batch=8"
    generate(target, path, *many, prompt=None)
  assert batches_timed(calibration) == {1, 8}
  second = calibrated.read(calibration).fits
  assert len(second) == 1 and second != first  # of larger passes
  assert batches_timed(other) == {8}
  generate(target, other)
  assert batches_timed(other) == {1, 8}


def bench(target, *arguments):
  programs.run(
    "bench", f"--target={target}", "--context=8", "--max_new_tokens=8",
    "--repeats=2", *arguments,
  )  # fmt: skip


def test_the_loop_is_given_what_rounds_cost(target, costs, tmp_path, capsys):
  with pytest.MonkeyPatch.context() as patch:
    patch.setitem(costs, "slope", 0.25)  # of a pass, for every token more
    generate(target, tmp_path / "c.json", "--k=adaptive", "--most_k=3")
  printed = capsys.readouterr().out
  [numbers] = re.findall(r"k = 3 at most, adaptive\(costs=\[(.*?)\], ", printed)
  table = [float(number) for number in numbers.split(", ")]
  # Three levels and the pending token stand in a pass of four, as two do not.
  np.testing.assert_allclose(table, [1, 1.25, 1.5, 1.75], rtol=0.1)
  assert "draft tokens a round" in printed


@pytest.mark.parametrize(
  "k", ["auto", pytest.param("adaptive", marks=pytest.mark.slow)]
)
def test_bench_decides_for_every_batch_and_times_them_together(
  k, target, costs, tmp_path, capsys
):
  path = tmp_path / "c.json"
  with programs.waits() as waits:
    bench(
      target, f"--k={k}", "--drafter=lookup", "--most_k=2", "--batch=1,2",
      "--passes=1", "--limit=2", f"--calibration={path}",
    )  # fmt: skip
  assert batches_timed(path) == {1, 2}
  assert sum(wait.startswith("timing this machine") for wait in waits) == 1
  printed = capsys.readouterr().out
  document = json.loads(printed.splitlines()[-1])
  assert [run["batch"] for run in document["runs"]] == [1, 2]
  if k == "adaptive":
    assert document["settings"]["k"] == "adaptive"
    assert [run["k"] for run in document["runs"]] == [2, 2]
    assert re.findall(r"adaptive.* \(batch (.)\)", printed) == ["1", "2"]


def test_bench_calibrates_and_reports_its_errors(
  target, costs, tmp_path, capsys
):
  path = tmp_path / "c.json"
  early_exit = "--drafter=early_exit(1)", "--k=2", "--batch=2"
  bench(target, *early_exit, f"--calibrate={path}")
  printed = capsys.readouterr().out
  assert "held out" in printed and "overhead of rounds" in printed
  assert len(json.loads(path.read_text())["fits"]) == 2


def test_bench_calibrates_what_has_few_heads(target, costs, tmp_path):
  drafter, path = tmp_path / "three.safetensors", tmp_path / "c.json"
  head_config = HeadConfig("medusa", num_layers=0, levels=3, width=8)
  programs.save_drafter(target, drafter, head_config)
  head = f"--drafter=head({drafter})"
  bench(target, head, "--k=1", f"--calibrate={path}")
  [rounds] = json.loads(path.read_text())["overhead"].values()
  assert {k for _, k, *_ in rounds["times"]} == {0, 1}


def test_a_draft_like_its_target_is_timed_with_all_its_tokens(target, costs):
  setup = Setup(
    str(target), f"model({target})", k=3, prompt_size=8, max_new_tokens=8
  )
  loaded = setup.load_target()
  rows = [[1, 2, 3, 4, 5, 6, 7, 8]]
  calibration = calibrated.timed(setup, loaded, rows, (1,), (3,), 16)
  assert calibrated.covers(setup, loaded, calibration, 1, 3)


def test_rounds_of_recycling_are_timed_with_a_draft_in_each(
  target, costs, monkeypatch
):
  """A text's own table is empty at first: such rounds are short ones."""
  timed, honest = [], timing.round_timer

  def round_timer(decoder, rows):
    timed.append(decoder)
    return honest(decoder, rows)

  monkeypatch.setattr(timing, "round_timer", round_timer)
  sizes = {"prompt_size": 8, "max_new_tokens": 9}
  setup = Setup(str(target), "recycling", k=2, **sizes)
  rows = [[1, 2, 3, 4, 5, 6, 7, 8]]
  calibration = calibrated.timed(
    setup, setup.load_target(), rows, (1,), (2,), 16
  )
  assert [*calibration.overhead] == [deployments.setting_of(setup)]
  [decoder] = [one for one in timed if one.num_nodes == 3]
  stats, _ = decoder.first_rounds(rows, 3)
  short, whole = stats.widths
  assert short == 0 < whole


def test_rounds_of_other_lengths_stay_known(target, costs):
  """Else two values of --most_k in turns are timed anew each time."""
  sizes = {"prompt_size": 8, "max_new_tokens": 8}
  setup = Setup(str(target), "lookup", k=4, **sizes)
  loaded, calibration = setup.load_target(), None
  for most_k in (4, 3):
    ks = calibrated.step_ks(most_k)
    given = setup, loaded, [[1] * 8], (1,), ks, 16
    calibration = calibrated.timed(*given, base=calibration)
  for most_k in (4, 3):
    ks = calibrated.step_ks(most_k)
    assert calibrated.covers(setup, loaded, calibration, 1, most_k, ks)


def test_programs_that_time_at_once_lose_nothing(target, costs, tmp_path):
  """Each has read the file before the other wrote it."""
  path, timed = tmp_path / "c.json", {}
  sizes = {"k": 2, "prompt_size": 8, "max_new_tokens": 8}
  for drafter in ("lookup", "early_exit(1)"):
    setup = Setup(str(target), drafter, **sizes)
    loaded = setup.load_target()
    given = setup, loaded, [[1] * 8], (1,), (2,), 16
    timed[deployments.setting_of(setup)] = calibrated.timed(*given)
  for calibration in timed.values():
    calibrated.add(path, calibration, None)
  assert {*calibrated.read(path).overhead} == {*timed}


def test_a_folder_that_cannot_be_made_is_named_before_it_is_timed(
  target, costs, tmp_path, monkeypatch
):
  def never(*_):
    raise AssertionError("timed")

  (tmp_path / "home").write_text("")
  monkeypatch.setenv("HOME", str(tmp_path / "home"))
  monkeypatch.setattr(timing, "pass_timer", never)
  with pytest.raises(SystemExit, match=r"home/.*json could not be written: "):
    programs.run(
      "generate", f"--target={target}", "--prompt=abab", "--k=auto",
      "--most_k=2", "--max_new_tokens=8", "--drafter=lookup",
    )  # fmt: skip


def test_lengths_are_compared_with_the_default_k(target, costs, capsys):
  """Before, with --most_k, where no number was given."""
  bench(
    target, f"--drafter=model({target})", "--length=entropy", "--most_k=5",
    "--passes=1", "--limit=2",
  )  # fmt: skip
  document = json.loads(capsys.readouterr().out.splitlines()[-1])
  assert [run["k"] for run in document["runs"]] == [3, 5]


@pytest.mark.parametrize(
  "drafter, shape, sentence",
  [
    ("early_exit(1)", "chains(2)", "is of chains"),
    ("lookup(k=2) | eagle(eagle)", "chain", "rounds of one drafter"),
    ("{folder}/mine.py:mine", "chain", "takes neither k nor shape"),
    ("layer_skip(attention=[1], threshold=0.5)", "chain", "how much it drafts"),
    ("suffix", "chain", "suffix decides how much it drafts"),
  ],
)
def test_rounds_of_several_kinds_are_not_calibrated(
  tmp_path, drafter, shape, sentence
):
  (tmp_path / "mine.py").write_text("def mine(target):\n  pass\n")
  setup = Setup(drafter=drafter.format(folder=tmp_path), shape=shape)
  with pytest.raises(ValueError, match=sentence):
    calibrated.check(setup)


@pytest.mark.parametrize("part", ["drafter", "acceptance"])
def test_what_was_edited_is_calibrated_anew(part, tmp_path):
  file = tmp_path / "mine.py"
  file.write_text(
    "from specdec import acceptance\n\n"
    "def mine(target=None, k=0):\n  return acceptance.block()\n"
  )
  setup = Setup(**{part: f"{file}:mine"})
  before = deployments.setting_of(setup)
  assert deployments.setting_of(setup) == before
  file.write_text(file.read_text() + "# edited\n")
  assert deployments.setting_of(setup) != before
