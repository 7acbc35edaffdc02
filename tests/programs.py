"""Programs run in this process, on tiny models written here."""

import contextlib
import importlib
import pathlib
import re
import subprocess
import sys
from unittest import mock

import jax
import jax.numpy as jnp
import tokenizers
from tokenizers import decoders, models, pre_tokenizers
from tqdm import tqdm

from specdec import checkpoints
from specdec.checkpoints import learned
from specdec.models import transformer
from specdec.models.config import TransformerConfig
from specdec.noise import row_keys
from specdec.roofline import hardware

HARDWARE = hardware.Hardware(
  name="a machine of no speed",
  memory=None,
  bandwidth=((1 << 20, 1e9), (1 << 30, 5e8)),
  copy_bandwidth=4e8,
  flops={"float32": 1e9},
  date="2026-01-01",
  jax_version=jax.__version__,
)
SCRIPTS = pathlib.Path(__file__).parents[1] / "scripts"


def fake_machine(monkeypatch):
  """Scripts run on HARDWARE; nothing is measured, or kept in a user's cache."""
  monkeypatch.setattr(hardware, "local", lambda **_: HARDWARE)
  monkeypatch.setattr(hardware, "device_name", lambda: HARDWARE.name)
  # So little is read slower by itself than in a pass, which bench refuses.
  monkeypatch.setattr(hardware, "measure_bandwidth", lambda *_, **__: 1e15)
  monkeypatch.setattr(hardware, "bandwidth_timer", lambda *_: lambda: 1e15)


def run(name, *arguments):
  """Runs specdec.cli.NAME with these flags."""
  main = importlib.import_module(f"specdec.cli.{name}").main
  # Compiled programs stay in the tests' own cache, which bench turns off.
  cached = "compilation_cache" in main.flag_values([name])
  cache = ["--compilation_cache="] if cached else []
  caching = jax.config.jax_enable_compilation_cache
  try:
    main([name, *cache, *arguments])
  finally:
    jax.config.update("jax_enable_compilation_cache", caching)


def launch(name, *arguments, **options):
  """Runs scripts/NAME.py in a process of its own."""
  command = [sys.executable, SCRIPTS / f"{name}.py", *arguments]
  return subprocess.run(command, capture_output=True, text=True, **options)


@contextlib.contextmanager
def waits():
  """Yields a list of what `display.progress` waited for, as each ends."""
  ended, write = [], tqdm.write

  def spy(text, **options):
    match = re.fullmatch(r"(.*) \.\.\. \d+\.\d s", text)
    ended.extend(match.groups() if match else ())
    write(text, **options)

  with mock.patch.object(tqdm, "write", spy):
    yield ended


def keys_of(key, rows=64):
  """The keys of so many rows' noise."""
  keys = row_keys(key, jnp.arange(rows))
  return {*map(tuple, jax.random.key_data(keys).tolist())}


def save_drafter(target, path, head_config):
  """A random drafter for a target of `write_model`; its weights."""
  checkpoint = checkpoints.load(target)
  head = learned.Learned(head_config, None, None).draft_head(checkpoint.config)
  net = head.init(jax.random.key(0))
  learned.save(path, head_config, None, net, learned.fingerprint(checkpoint))
  return net


def write_model(folder, seed=0, letters=None, **changes):
  """A random two-layer model whose tokens are single letters."""
  letters = letters or [chr(i) for i in range(ord("a"), ord("z") + 1)] + [" "]
  shape = dict(vocab_size=len(letters), num_layers=2, width=16, mlp_width=32)
  heads = dict(num_heads=2, num_kv_heads=1, head_dim=8)
  config = TransformerConfig(**shape | heads | changes)
  params = transformer.init_params(config, jax.random.key(seed))
  checkpoints.save_safetensors(folder, params, config)
  tokenizer = tokenizers.Tokenizer(
    models.WordLevel({c: i for i, c in enumerate(letters)}, unk_token="a")
  )
  tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
  tokenizer.decoder = decoders.Fuse()
  tokenizer.save(str(folder / "tokenizer.json"))
  (folder / "tokenizer_config.json").write_text("{}")
  return folder
