"""Installs specdec: speculative decoding research on JAX."""

from setuptools import find_packages, setup

setup(
  name="specdec",
  version="0.1.0",
  description="Speculative decoding of language models on JAX, losslessly",
  license="Apache-2.0",
  python_requires=">=3.11",
  packages=find_packages(include=["specdec", "specdec.*"]),
  package_data={
    "specdec": ["page.html", "report_page.html", "shipped/*", "shipped/*/*"]
  },
  install_requires=[
    "jax>=0.10",
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
  extras_require={
    "tpu": ["jax[tpu]>=0.10"],
    "cuda13": ["jax[cuda13]>=0.10"],
    "hub": ["huggingface_hub"],
    "search": ["optuna"],
    "dev": ["jsonschema", "optuna", "pytest", "pytest-xdist", "ruff"],
  },
)
