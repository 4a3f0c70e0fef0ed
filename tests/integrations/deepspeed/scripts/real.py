"""Runs a script under the DeepSpeed that is installed, without compiling its native operators."""

import os
import runpy
import sys

import deepspeed

# Asked before each operator is compiled: none is to be had, so torch's own functions serve.
deepspeed.ops.__compatible_ops__ = {}
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
# What it found is written. A thread that it leaves running may abort the process as the interpreter ends.
sys.stdout.flush()
sys.stderr.flush()
os._exit(0)
