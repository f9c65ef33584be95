"""flowgrpo_fast: online RL for flow-matching generators. Importing it, or `flowgrpo_fast.ops`, needs torch alone."""

from flowgrpo_fast.version import __version__ as __version__
