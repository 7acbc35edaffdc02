"""Strict settings for every test: no silent broadcasting, no own warnings."""

import os
import pathlib
import sys
import tempfile

import virtual

# Tests compile hundreds of tiny programs: quick code is not worth the wait. The
# last two take two fifths off compilation where XLA has them.
if "XLA_FLAGS" not in os.environ:
  os.environ["XLA_FLAGS"] = " ".join(
    virtual.known_flags(
      [
        "--xla_backend_optimization_level=0",
        "--xla_llvm_disable_expensive_passes=true",
        "--xla_cpu_use_fusion_emitters=false",
        "--xla_cpu_parallel_codegen_split_count=1",
      ]
    )
  )

# Scripts import their siblings; tests/programs.py imports scripts.
sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "scripts"))

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
  """Compiled programs of a module are dropped behind it.

  Each of them maps pieces of memory, and Linux allows a process 65,530: without
  this a long run is aborted in the middle of a compilation.
  """
  yield
  jax.clear_caches()


def pytest_configure(config: pytest.Config) -> None:
  config.addinivalue_line("filterwarnings", "error:::specdec")
