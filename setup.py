"""Installs specdec: speculative decoding research on JAX."""

import pathlib
import re

from setuptools import find_packages, setup

# 0.11.0, and 0.11.1 with flax up to 0.12.8, do not run together.
JAX = "jax>=0.10,!=0.11.0,!=0.11.1"

INIT = pathlib.Path(__file__).with_name("specdec") / "__init__.py"
VERSION = re.search(r'__version__ = "(.*)"', INIT.read_text())[1]

setup(
  name="specdec-jax",  # "specdec" on the package index is another project
  version=VERSION,
  description="Speculative decoding of language models on JAX, losslessly",
  license="Apache-2.0",
  python_requires=">=3.11",
  packages=find_packages(include=["specdec", "specdec.*"]),
  package_data={
    "specdec": ["py.typed", "shipped/*", "shipped/*/*"],
    "specdec.models": ["*.cc"],
    "specdec.report": ["*.html", "*.svg"],
  },
  install_requires=[
    JAX,
    "flax",
    "optax",
    "orbax-checkpoint",
    "ml-collections",
    "absl-py",
    "chex",
    "tokenizers",
    "safetensors",
    "gguf",
    "jinja2",
    "tqdm",
    "tensorboardX",
    "matplotlib",
    "scipy",
  ],
  entry_points={"console_scripts": ["specdec=specdec.cli.console:main"]},
  extras_require={
    "tpu": [JAX.replace("jax", "jax[tpu]")],
    "cuda13": [JAX.replace("jax", "jax[cuda13]")],
    "gcs": ["gcsfs"],
    "hub": ["huggingface_hub"],
    "search": ["optuna"],
    "parquet": ["pyarrow"],
    "docs": ["sphinx==9.1.*", "sphinx-book-theme==1.4.*", "myst-nb==1.4.*"],
    "dev": [
      "jsonschema",
      "optuna",
      "pyarrow",
      "pytest",
      "pytest-xdist>=3.7",
      "ruff",
    ],
  },
)
