"""The folder that programs of long runs write to."""

from absl import flags

flags.DEFINE_string(
  "output", None, "Folder of the results; long runs go on from what it holds."
)
