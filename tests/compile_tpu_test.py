"""The real steps compile for a TPU that is not there, and are read right."""

import dataclasses
import json
import pathlib

import jax
import pytest

import programs
from cache_copies import copies_anywhere
from specdec.checkpoints import hf_config, learned
from specdec.compiled import lowering, steps
from specdec.drafters.heads.block_config import BlockConfig
from specdec.drafters.heads.head_config import HeadConfig
from specdec.models import presets
from specdec.models.parts import Recurrence

EXAMPLES = pathlib.Path(__file__).parents[1] / "examples"
SMALL = (
  "--mesh=model:4", "--target=preset:llama3-1b",
  "--drafter=model(preset:llama3-1b)", "--batch=2", "--context=32768", "--k=3",
  "--acceptance=rejection", "--temperature=1",
)  # fmt: skip


def run(*arguments, base=SMALL):
  """In a process of its own: libtpu is opened once."""
  return programs.launch("compile_tpu", *base, *arguments)


def slow(*case):
  return pytest.param(*case, marks=pytest.mark.slow)


@pytest.mark.slow
def test_a_small_preset_on_four_chips(tmp_path):
  pytest.importorskip("libtpu", reason="libtpu is not installed")
  path = tmp_path / "steps.json"
  some = "--here", "--steps=draft,verify,accept"
  done = run("--topology=v5e:2x2", *some, f"--json={path}")
  assert done.returncode == 0, done.stderr[-2000:]
  document = json.loads(path.read_text())
  draft, verify, accept = document["steps"]
  layers, width, vocabulary = 16, 2048, 128_256
  sums = [x for x in verify["exchanges"] if x["kind"] == "all-reduce"]
  wide = [x for x in sums if any(width in shape for shape in x["shape"])]
  assert sum(x["times"] for x in wide) == 2 * layers + 1  # the embedding's
  for one in (*verify["exchanges"], *accept["exchanges"]):
    for shape in one["shape"]:
      assert vocabulary not in shape and vocabulary // 4 not in shape, one
    # No weights, no KV and no distribution travel: what does is one step's
    # streams, or a few numbers of every draft token.
    assert one["kind"] == "all-reduce" or one["bytes"] < 4096, one
  for step in (draft, verify):
    moved = step["read"] + step["written"]
    expected = document["cost_model"][step["step"]]["bytes"]
    assert 0.9 < moved / expected < 1.15, step["step"]
  # Half of it is KV, in blocks of which as many are read as a text fills.
  assert verify["temporaries"] < 64 * 2**20
  assert all(step["fits"] for step in document["steps"])


BLOCK = dict(features=(2, 4, 6), levels=7, num_layers=2)
HEADS = {
  "eagle": HeadConfig("eagle", head="shared"),
  "block": HeadConfig("block", **BLOCK),
  "peagle": HeadConfig("peagle", **BLOCK),
}


def compiled(drafter, folder, *flags):
  """The document of the steps with a head, and their programs in a folder."""
  pytest.importorskip("libtpu", reason="libtpu is not installed")
  path = folder / "steps.json"
  done = run(
    *(f"--drafter={drafter}", "--k=4", *flags, "--here"),
    *("--acceptance=rejection", "--temperature=1"),
    *(f"--json={path}", f"--hlo={folder}"),
    base=(),
  )
  assert done.returncode == 0, done.stderr[-2000:]
  return json.loads(path.read_text())


def test_a_head_reads_the_weights_that_it_has(tmp_path):
  """Of float32 weights a bfloat16 copy was made, and read by later levels."""
  flags = "--topology=v5e:2x4", "--mesh=model:8", "--target=preset:llama3-8b"
  flags += ("--draft_ways=1",)
  head = "head(preset:eagle3)"
  document = compiled(head, tmp_path, *flags, "--steps=draft")
  [draft], expected = document["steps"], document["cost_model"]["draft"]
  moved = draft["read"] + draft["written"]
  assert 0.97 < moved / expected["bytes"] < 1.03
  assert draft["temporaries"] < 64 * 2**20


_OF_1B = dict(
  layout="published",
  features=(2, 8, 13),
  width=2048,
  mlp_width=8192,
  num_heads=32,
  num_kv_heads=8,
  head_dim=64,
)
ROWS = {  # with rows for every token, of their own
  "eagle3": HeadConfig("eagle3", **_OF_1B),
  "medusa": HeadConfig(
    "medusa", num_layers=0, layout="published", width=2048, levels=4
  ),
  "domino": HeadConfig(
    "block",
    head="shared",
    block=BlockConfig(
      slots="next", successor="gru", rank=256, state=512, mask_token=5
    ),
    **_OF_1B,
  ),
}


@pytest.mark.parametrize(
  "kind, ways",
  [
    ("domino", 4) if (kind, ways) == ("domino", 4) else slow(kind, ways)
    for kind in ROWS
    for ways in (1, 4)
  ],
)
def test_a_chip_reads_its_part_of_rows_for_all_tokens(kind, ways, tmp_path):
  """Though every chip may hold all of them, of which it computes its part of
  the logits."""
  head = tmp_path / "head.safetensors"
  learned.save(head, ROWS[kind], None, {}, {})  # no weight is read
  flags = "--topology=v5e:2x2", "--mesh=model:4", "--target=preset:llama3-1b"
  flags += f"--draft_ways={ways}", "--steps=draft"
  document = compiled(f"head({head})", tmp_path, *flags)
  [draft], expected = document["steps"], document["cost_model"]["draft"]
  moved = draft["read"] + draft["written"]
  # The compiler keeps some weights on the chip from one level to the next.
  assert 0.7 < moved / expected["bytes"] < 1.05
  assert draft["arguments"] > document["plan"]["drafter"]


@pytest.mark.parametrize(
  "kind", [kind if kind == "block" else slow(kind) for kind in HEADS]
)
def test_a_head_reads_the_cache_that_it_has(kind, tmp_path):
  """KV in float32 was converted whole ahead of the loop over its blocks, and
  for that moved to on-chip memory and back."""
  head = tmp_path / "head.safetensors"
  learned.save(head, HEADS[kind], None, {}, {})  # no weight is read
  flags = "--topology=v5e:2x2", "--mesh=data:4", "--target=stdlib-11m"
  size = "--batch=4", "--context=65536"
  document = compiled(
    f"head({head})", tmp_path, *flags, *size, "--steps=draft,loop"
  )
  cache = jax.ShapeDtypeStruct((1, 1, 65552, 32), "bfloat16")
  for step in ("draft", "loop"):
    text = (tmp_path / f"{step}.txt").read_text()
    assert "[1,1,65552,32]" in text
    assert copies_anywhere(text, [cache]) == [], step
  draft, expected = document["steps"][0], document["cost_model"]["draft"]
  moved = draft["read"] + draft["written"]
  # Small as it is, the compiler may take the table of embeddings on the chip
  # whole, and keeps the weights there from one pass of eagle's to the next.
  table = 4096 * 384 * 2
  assert moved < 1.05 * expected["bytes"] + table
  assert moved > (0.8 if kind == "eagle" else 0.97) * expected["bytes"]


@pytest.mark.slow
def test_a_latent_vector_is_read_once_as_key_and_value(tmp_path):
  """It was read for the scores, and again for what attention yields."""
  config = dataclasses.replace(
    presets.get("deepseek-v3", "bfloat16"),
    num_layers=4,
    width=2048,
    num_heads=32,
    dense_layers=(0,),
    num_experts=16,
    vocab_size=32_000,
  )
  content = json.dumps(hf_config.render(config))
  (tmp_path / "config.json").write_text(content)
  index = {"weight_map": {"lm_head.weight": "none.safetensors"}}
  (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
  flags = "--topology=v5e:2x2", "--mesh=model:4", f"--target={tmp_path}"
  flags += "--batch=8", "--context=32768", "--dtype=bfloat16"
  document = compiled("lookup", tmp_path, *flags, "--steps=verify")
  [verify], expected = document["steps"], document["cost_model"]["verify"]
  moved = verify["read"] + verify["written"]
  assert 0.97 < moved / expected["bytes"] < 1.05


@pytest.mark.slow
def test_states_of_recurrent_layers_are_not_copied(tmp_path):
  """They were written whole in every pass: a loop a layer, over rows, moved
  them to on-chip memory and back."""
  recurrence = Recurrence(
    "gated_delta",
    (0, 1, 2),
    num_heads=32,
    num_key_heads=16,
    key_dim=128,
    value_dim=128,
  )
  config = dataclasses.replace(
    presets.get("qwen3-next-80b-a3b", "bfloat16"),
    num_layers=4,
    num_experts=16,
    experts_per_token=2,
    vocab_size=4096,
    recurrence=recurrence,
  )
  content = json.dumps(hf_config.render(config))
  (tmp_path / "config.json").write_text(content)
  index = {"weight_map": {"lm_head.weight": "none.safetensors"}}
  (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
  flags = "--topology=v5e:2x2", f"--target={tmp_path}", "--context=512"
  flags += "--dtype=bfloat16", "--num_nodes=16"

  def check(step, shape, *more):
    document = compiled("lookup", tmp_path, *flags, *more, f"--steps={step}")
    text = (tmp_path / f"{step}.txt").read_text()
    assert "f32[{},{},{},{}]".format(*shape) in text
    state = jax.ShapeDtypeStruct(shape, "float32")
    assert copies_anywhere(text, [state]) == [], step
    return document

  document = check("verify", (64, 8, 128, 128), "--mesh=model:4", "--batch=64")
  [verify], expected = document["steps"], document["cost_model"]["verify"]
  moved = verify["read"] + verify["written"]
  # Of so many rows slots are written on the chip, and then back whole.
  assert 0.97 < moved / expected["bytes"] < 1.15
  # A loop may keep a state on the chip, if there is room for it: here is none.
  check("loop", (64, 32, 128, 128), "--mesh=data:4", "--batch=256")


@pytest.mark.slow
def test_a_cache_in_eight_bits_is_read_as_it_is(tmp_path):
  """Of heads of 128; the compiler copies that of narrower ones."""
  flags = "--topology=v5e:2x4", "--mesh=model:8", "--target=preset:llama3-8b"
  flags += "--batch=8", "--context=32768", "--dtype=bfloat16", "--kv=int8"
  document = compiled("lookup", tmp_path, *flags, "--steps=verify")
  [verify], expected = document["steps"], document["cost_model"]["verify"]
  moved = verify["read"] + verify["written"]
  assert 0.97 < moved / expected["bytes"] < 1.03
  assert verify["temporaries"] < 128 * 2**20


def test_a_slice_that_libtpu_lacks_is_refused():
  pytest.importorskip("libtpu", reason="libtpu is not installed")
  done = run("--topology=v5e:9x9")
  assert done.returncode == 1
  assert "known to work: v4:2x2x1, v5e:2x2" in done.stderr, done.stderr[-500:]
  assert "Traceback" not in done.stderr


def test_a_step_is_compiled_by_the_same_command_line(monkeypatch, capsys):
  """The default target; in a process of its own, whatever that gives."""
  commands = []

  def apart(module, argv, patience):
    commands.append((module, argv, patience))
    return {"error": "no compiler"}

  monkeypatch.setattr(steps, "devices", lambda _: jax.devices())
  monkeypatch.setattr(steps, "compile_apart", apart)
  flags = ["--mesh=model:1", "--k=2", "--patience_seconds=9"]
  with pytest.raises(SystemExit, match=r"prefill.*accept.*: not compiled"):
    programs.run("compile_tpu", *flags)
  assert [patience for *_, patience in commands] == [9] * len(lowering.STEPS)
  module, argv, _ = commands[1]
  assert module == "specdec.cli.compile_tpu"
  last = ["--steps=draft", "--here", "--patience_seconds=0"]
  assert argv == [*flags, *last]
  assert "no compiler" in capsys.readouterr().out


def test_a_process_reports_its_step_its_error_or_its_delay(
  tmp_path, monkeypatch
):
  (tmp_path / "compiles.py").write_text(
    "import pathlib, sys, time\n"
    "way, path = sys.argv[1], sys.argv[-1].removeprefix('--json=')\n"
    "time.sleep(30 if way == 'slow' else 0)\n"
    "if way == 'bad': sys.exit('out of memory')\n"
    'pathlib.Path(path).write_text(\'{"steps": [{"flops": 1}]}\')\n'
  )
  monkeypatch.setenv("PYTHONPATH", str(tmp_path))
  reports = [
    steps.compile_apart("compiles", [way], patience)
    for way, patience in (("good", 0), ("bad", 0), ("slow", 1))
  ]
  errors = [{"error": "out of memory"}, {"error": "not in 1 s"}]
  assert reports == [{"flops": 1}, *errors]
