"""Strict settings for every test: no silent broadcasting, no own warnings."""

import os
import pathlib
import tempfile

import virtual

# Tests compile hundreds of tiny programs: quick code is not worth the wait. The
# last two take two fifths off compilation where XLA has them.
if "XLA_FLAGS" not in os.environ:
  os.environ["XLA_FLAGS"] = " ".join(
    virtual.supported_flags(
      [
        "--xla_backend_optimization_level=0",
        "--xla_llvm_disable_expensive_passes=true",
        "--xla_cpu_use_fusion_emitters=false",
        "--xla_cpu_parallel_codegen_split_count=1",
      ]
    )
  )

import jax
import pytest

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update(
  "jax_compilation_cache_dir",
  os.environ.get(
    "SPECDEC_TEST_CACHE",
    str(pathlib.Path(tempfile.gettempdir()) / "specdec-test-compilations"),
  ),
)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


@pytest.fixture(autouse=True, scope="module")
def forget_programs():
  """Compiled programs of a module are dropped after it.

  Each of them maps pieces of memory, and Linux allows a process 65,530: without
  this a long run is aborted in the middle of a compilation.
  """
  yield
  jax.clear_caches()


@pytest.fixture(autouse=True)
def forget_many_programs():
  """Within a module that has many of them, too."""
  yield
  maps = pathlib.Path("/proc/self/maps")
  if maps.exists() and maps.read_bytes().count(b"\n") > 25_000:
    jax.clear_caches()


@pytest.fixture(scope="session")
def target(tmp_path_factory):
  """A model whose tokens are letters (`programs.write_model`), to read only."""
  import programs  # imports what a session without programs does not need

  return programs.write_model(tmp_path_factory.mktemp("target"))


# Modules that plant bugs by patching functions of the decode loop.
PLANTING = (
  "constructors_test",
  "decode_distribution_test",
  "fallback_test",
  "learned_test",
  "memory_test",
  "noise_test",
)


@pytest.fixture(autouse=True)
def fresh_programs(request):
  """What a patched function was traced into is no other test's program.

  Equal drafters and rules are one object, so jit would hand it on.
  """
  planting = request.module.__name__ in PLANTING
  planting = planting and "monkeypatch" in request.fixturenames
  if planting:
    jax.clear_caches()
  yield
  if planting:
    jax.clear_caches()


def pytest_configure(config: pytest.Config) -> None:
  config.addinivalue_line("filterwarnings", "error:::specdec")
