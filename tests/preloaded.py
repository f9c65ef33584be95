"""Imported once by the server that ranks are forked from: everything that a rank imports, and what DeepSpeed finds out about the machine.

Frozen, so that a rank's garbage collections do not look through it: DeepSpeed asks for one with every partitioned network, 0.4 s in a fresh rank.
"""

import gc

import deepspeed.ops

# Imported by deepspeed.initialize, and imports all of torch's compiler: 3.3 of a rank's 4.4 s.
import deepspeed.runtime.zero.muon.muon_optimizer

import flowgrpo_fast.models.qwen_image
import flowgrpo_fast.rewards.ocr
import flowgrpo_fast.trainer  # noqa: F401
import tests.tiny  # noqa: F401

assert deepspeed.ops.__compatible_ops__  # found out at the first access, by running the compiler
gc.collect()
gc.freeze()
