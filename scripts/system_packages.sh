#!/usr/bin/env bash
# Makes sure that the system packages of the build are there: a C++20 compiler, GoogleTest, and
# Python's venv module and headers, and the given commands. Installs what is missing through apt where
# that is allowed; otherwise prints the one line to type. Usage: system_packages.sh PYTHON [COMMAND ...]
set -euo pipefail

python=$1
# Packages whose names differ from the command's.
declare -A package_of=([aarch64-linux-gnu-g++]=g++-aarch64-linux-gnu [qemu-aarch64]=qemu-user)
missing=()
for command in "${@:2}"; do
  command -v "$command" >/dev/null || missing+=("${package_of[$command]:-$command}")
done

cxx20_works() {
  printf '#include <bit>\n#include <span>\n#include <thread>\nint main() { std::jthread t; return std::bit_cast<int>(0.0F); }\n' |
    "${CXX:-g++}" -std=c++20 -x c++ -fsyntax-only - 2>/dev/null
}

cxx20_works || missing+=(g++)
[ -e /usr/include/gtest/gtest.h ] || missing+=(libgtest-dev)
if ! command -v "$python" >/dev/null; then
  missing+=(python3 python3-venv python3-dev)
else
  "$python" -c 'import ensurepip, venv' 2>/dev/null || missing+=(python3-venv)
  "$python" -c 'import pathlib, sys, sysconfig
sys.exit(not (pathlib.Path(sysconfig.get_path("include")) / "Python.h").exists())' || missing+=(python3-dev)
fi

if [ ${#missing[@]} -gt 0 ]; then
  as_root=()
  if [ "$(id -u)" -ne 0 ]; then as_root=(sudo); fi
  line="${as_root[*]} apt-get install -y ${missing[*]}"
  allowed=true
  if ! command -v apt-get >/dev/null; then allowed=false; fi
  if [ "$(id -u)" -ne 0 ] && ! sudo -n true 2>/dev/null; then allowed=false; fi
  if [ $allowed = false ]; then
    echo "Missing system packages; install them with:" >&2
    echo "  $line" >&2
    exit 1
  fi
  "${as_root[@]}" apt-get update -q
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -q "${missing[@]}"
  if ! cxx20_works; then
    echo "${CXX:-g++} does not compile C++20 (GCC 11 or newer does); set CXX to a compiler that does" >&2
    exit 1
  fi
fi

"$python" -c 'import sys
if sys.version_info < (3, 10):
    sys.exit(f"Python {sys.version.split()[0]} found, 3.10 or newer needed; set PYTHON=... to one")'
