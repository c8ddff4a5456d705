#!/usr/bin/env bash
# Builds the package for the CPU with Clang, loads every symbol of it, and runs the self-check of `flashattn-ext doctor`.
#
#   tools/check_clang_build.sh      needs .venv with torch (make .venv/created); CLANG names another compiler than clang++
#
# Without optimisation, which takes a quarter of the time and leaves more symbols to the linker. The build is in build/clang, so that
# the one of the checkout stays. A machine without Clang gets it from the packages of its distribution. Status 2: there is no Clang and
# no package manager that this script knows, and nothing was checked.
set -euo pipefail
cd "${0%/*}/.."
clang="${CLANG:-clang++}"
python="$PWD/.venv/bin/python"
copy="$PWD/build/clang"

has_clang() { "$clang" -fopenmp -fsyntax-only -include omp.h -x c++ /dev/null 2>/dev/null; }

install_clang() {
  local root=()
  if ((EUID != 0)); then root=(sudo -n); fi
  echo "$0: $clang or its OpenMP is missing; installs them"
  case "$1" in
    apt-get)
      "${root[@]}" apt-get update -q || true  # one source of packages that fails need not be that of Clang
      "${root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends clang libomp-dev
      ;;
    dnf) "${root[@]}" dnf install -q -y clang libomp-devel ;;
  esac
}

if ! has_clang; then
  manager="$(command -v apt-get || command -v dnf || true)"
  if [[ -z "$manager" ]]; then
    echo "$0: not checked: no $clang with OpenMP, and neither apt-get nor dnf to install one" >&2
    exit 2
  fi
  install_clang "${manager##*/}" >&2
  has_clang || { echo "$0: $clang does not compile with OpenMP: install clang and libomp" >&2 && exit 1; }
fi

mkdir -p "$copy"
rm -rf "$copy"/{csrc,flashattn_ext,flashattn_ext_lab}
cp -Rp setup.py pyproject.toml VERSION README.md csrc flashattn_ext flashattn_ext_lab "$copy"
rm -f "$copy"/flashattn_ext/_*.so
# The last of several -O options counts, and those of the build come after the environment's. Objects of another Clang go.
wrapper="$(printf '#!/bin/sh\n# %s\nexec %q "$@" -O0' "$("$clang" --version | head -1)" "$(command -v "$clang")")"
[[ "$(cat "$copy/clang++" 2>/dev/null)" == "$wrapper" ]] || rm -rf "$copy/build"
echo "$wrapper" >"$copy/clang++"
chmod +x "$copy/clang++"
cd "$copy"
if ! CXX="$copy/clang++" FLASHATTN_EXT_CUDA=0 "$python" setup.py build_ext --inplace >build.log 2>&1; then
  grep -E "error|undefined|multiple definition" build.log >&2 || tail -20 build.log >&2
  echo "$0: the build with Clang fails; all of its output is in build/clang/build.log" >&2
  exit 1
fi
LD_BIND_NOW=1 "$python" -m flashattn_ext doctor >doctor.log || { cat doctor.log && exit 1; }
grep -E "build: compiler .*[Cc]lang" doctor.log || { echo "$0: not compiled by Clang" >&2 && exit 1; }
grep -E "self-check|refused call" doctor.log
