"""A CUDA toolkit that needs no GPU and no time: a script in the place of nvcc."""

from __future__ import annotations

from pathlib import Path

import pytest

# Object files are empty, the module's entry point is compiled by the real compiler, so the result loads.
# The environment says what it answers and when it fails; every compilation is noted in $FAKE_NVCC_CALLS.
NVCC = """#!/bin/bash
case " $* " in
*" --version "*) echo "Cuda compilation tools, release ${FAKE_NVCC_RELEASE:-13.0}, V13.0.88"; exit ;;
*" --list-gpu-arch "*) printf 'compute_75\\ncompute_80\\ncompute_90\\ncompute_100\\n'; exit ;;
*" -dryrun "*) echo "#$ TOP=$(dirname "$0")/.." >&2; exit ;;
*" -E "*)
  [ -z "$FAKE_NVCC_REFUSES" ] && exit
  echo "host_config.h:137:2: error: #error -- $FAKE_NVCC_REFUSES" >&2
  exit 1 ;;
esac
echo "$*" >> "$FAKE_NVCC_CALLS"
[ -z "$FAKE_NVCC_WAITS" ] || sleep "$FAKE_NVCC_WAITS"
[ -z "$FAKE_NVCC_FAILS" ] || { seq -f 'line %g' 100; echo "$FAKE_NVCC_FAILS" >&2; exit 2; }
out="${@: -1}"
case " $* " in
*" -shared "*) objects=(); for each; do [[ $each == *.o ]] && objects+=("$each"); done
  exec c++ -shared "${objects[@]}" -o "$out" ;;
*) exec c++ -x c++ -c /dev/null -o "$out" ;;
esac
"""


def install(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Makes the toolkit in `folder` the only one that is found; returns the file that notes its calls."""
    (folder / "bin").mkdir(parents=True)
    (folder / "lib").mkdir()
    (folder / "lib" / "libcudart.so.13").touch()
    nvcc = folder / "bin" / "nvcc"
    nvcc.write_text(NVCC)
    nvcc.chmod(0o755)
    calls = folder / "calls.txt"
    calls.touch()
    monkeypatch.setenv("CUDA_HOME", str(folder))
    monkeypatch.setenv("FAKE_NVCC_CALLS", str(calls))
    return calls
