#!/usr/bin/env bash
# Checks the package for Arm hosts (AArch64) on any Linux machine: with a cross compiler, and with qemu, which runs single programs.
#
#   tools/check_arm64.sh --kernels    what .ci/run has time for: compiles csrc/cpu, the front and ascend_c without warnings, and runs the
#                                     CPU kernels of every instruction set without torch (tests/kernels/instruction_sets.cpp). Needs
#                                     .venv with torch for its headers; does nothing if no source has changed
#   tools/check_arm64.sh [FOLDER]     everything: sets up Debian's arm64 Python and torch's wheel for it in FOLDER (default: a temporary
#                                     one; a second run continues there), builds a copy of the checkout, and runs `doctor`, the tests of
#                                     `make test-quick`, the fuzz tests of each instruction set, and the binding to torch_npu; --cuda too
#   tools/check_arm64.sh --cuda       compiles every CUDA source for an Arm host (GH200), where there is an nvcc: the host's code as in a
#                                     build, device code as PTX and without optimisation, which takes most of the time and has no host
#
# TORCH names the torch of the second form, default torch==2.10.0: the newest whose wheel for Arm is not a CUDA build. A Debian or
# Ubuntu machine gets a missing cross compiler or qemu from its packages. Status 2: they are missing and cannot be installed, and nothing
# was checked.
set -euo pipefail
cd "$(dirname "$0")/.."
torch="${TORCH:-torch==2.10.0}"
cross=aarch64-linux-gnu-g++

has_tools() { command -v "$cross" >/dev/null && command -v qemu-aarch64 >/dev/null; }

install_tools() {
  local root=()
  if ((EUID != 0)); then root=(sudo -n); fi
  command -v apt-get >/dev/null || return 0
  echo "$0: $cross or qemu-aarch64 is missing; installs them" >&2
  "${root[@]}" apt-get update -q >&2 || true # one source of packages that fails need not be that of these
  "${root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends \
    g++-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user >&2 || true
}

# Compiles a source to an object, or with -fsyntax-only to nothing.
compile() { # SOURCE OBJECT OPTION...
  "$cross" -Wall -Wextra -Werror -Wno-unknown-pragmas -Icsrc "${@:3}" -c "$1" -o "$2" || { echo "$1 does not compile for aarch64" >&2 && exit 255; }
}

check_kernels() {
  local folder=build/arm64 source flags torch_headers
  mkdir -p "$folder"
  if [[ -f "$folder/checked" && -z "$(find csrc ascend_c tests/kernels/instruction_sets.cpp "$0" -type f ! -name '*.pyc' -newer "$folder/checked" -print -quit)" ]]; then
    echo "csrc and ascend_c are unchanged since they were checked for aarch64"
    return
  fi
  rm -f "$folder"/*.o "$folder/checked"
  export -f compile
  export cross
  # The last of several -O options counts. -O1 compiles in two thirds of the time, and the kernels run as fast under qemu.
  flags="$(python3 -c 'import sys; sys.path.insert(0, "csrc"); import sources; print(*sources.GCC_FLAGS, *sources.CXX_FLAGS, "-O1")')"
  torch_headers="$(.venv/bin/python -c 'import sysconfig
from torch.utils.cpp_extension import include_paths
print(*(f"-isystem {path}" for path in [*include_paths(), sysconfig.get_path("include")]))')"
  # All kernels as one source, which takes a twentieth of the time: they share most templates.
  printf '#include "%s"\n' ascend_c/inst/*.cpp >"$folder/ascend_kernels.cpp"
  {
    for source in csrc/cpu/inst/*.cpp csrc/cpu/cpu.cpp tests/kernels/instruction_sets.cpp; do
      echo "$source $folder/$(basename "$source" .cpp).o -std=c++17 $flags"
    done
    # torch's headers have unused parameters.
    for source in csrc/module/torch.cpp csrc/backend/backend.cpp; do
      echo "$source /dev/null -std=c++20 -fsyntax-only -Wno-unused-parameter -DTORCH_EXTENSION_NAME=_C -fopenmp $torch_headers"
    done
    for source in ascend_c/*.cpp ascend_c/emulator/*.cpp "$folder/ascend_kernels.cpp"; do
      echo "$source /dev/null -std=c++17 -fsyntax-only -ffp-contract=off -Iascend_c/emulator/include -I."
    done
  } | xargs -P "$(nproc)" -L 1 bash -c 'compile "$@"' _
  "$cross" -static -pthread "$folder"/*.o -o "$folder/instruction_sets"
  # Neoverse N1 has no bf16 instructions.
  qemu-aarch64 -cpu neoverse-n1 "$folder/instruction_sets" --list neon generic
  qemu-aarch64 -cpu max "$folder/instruction_sets" neon_bf16 neon generic >"$folder/results.log" || { grep FAILS "$folder/results.log" && exit 1; }
  touch "$folder/checked"
  echo "csrc/cpu, the front and ascend_c compile for aarch64; the kernels of neon_bf16, neon and generic agree with fp64"
}

check_cuda() {
  command -v nvcc >/dev/null || { echo "no nvcc: the CUDA sources were not compiled for Arm hosts" && return; }
  local made top
  made="$(mktemp -d)"
  top="$(nvcc --dryrun -c -x cu /dev/null -o /dev/null 2>&1 | sed -n 's/^#\$ TOP=//p')"
  compile_cuda() { # SOURCE
    local target=90a
    case "$1" in */sm90*) ;; *) target=80 ;; esac
    # The toolkit of this machine need not have a folder for Arm hosts; its headers serve both.
    nvcc -ccbin "$cross" -std=c++17 -Ofc max -Werror all-warnings -DFLASHATTN_EXT_SM90 -Icsrc -isystem "$top/include" \
      "-gencode=arch=compute_$target,code=compute_$target" -c "$1" -o "$made/$BASHPID.o" ||
      { echo "$1 does not compile for an Arm host" >&2 && exit 255; }
  }
  export -f compile_cuda
  export cross made top
  python3 csrc/sources.py write-once "$made/sources" >"$made/list"
  xargs -P "$(nproc)" -I{} bash -c 'compile_cuda {}' <"$made/list"
  echo "all $(wc -l <"$made/list") CUDA sources compile for an Arm host"
  rm -rf "$made"
}

# Unpacks Debian's arm64 packages with their dependencies, without installing anything on this machine.
unpack_root() { # PACKAGE...
  local apt="$folder/apt"
  mkdir -p "$apt"/{state/lists/partial,cache/archives/partial,etc}
  : >"$apt/status"
  local options=(-o APT::Architecture=arm64 -o APT::Architectures::=arm64 -o Dir::State="$apt/state" -o Dir::State::status="$apt/status"
    -o Dir::Cache="$apt/cache" -o APT::Install-Recommends=false -o APT::Sandbox::User=root)
  apt-get "${options[@]}" update -q || true # sources without arm64 fail
  apt-get "${options[@]}" install -q -y --download-only "$@"
  mkdir -p "$root"
  local package
  for package in "$apt"/cache/archives/*.deb; do dpkg-deb -x "$package" "$root"; done
}

# A command of this name on the PATH of the emulated programs.
wrapper() { # NAME COMMAND...
  printf '#!/bin/sh\nexec %s "$@"\n' "${*:2}" >"$folder/bin/$1"
  chmod +x "$folder/bin/$1"
}

set_up() {
  [[ -x "$root/usr/bin/python3" ]] || unpack_root python3 libpython3-dev libgomp1 libstdc++6
  local version
  version="$(basename "$(readlink -f "$root/usr/bin/python3")")"
  mkdir -p "$folder/bin"
  wrapper python3 "env PYTHONHOME=$root/usr qemu-aarch64 -cpu \${QEMU_CPU:-max} -L $root -0 $folder/bin/python3 $root/usr/bin/$version"
  local name
  for name in c++ g++; do wrapper "$name" "$(command -v "$cross") -idirafter $root/usr/include"; done
  wrapper gcc "$(command -v "${cross%g++}gcc") -idirafter $root/usr/include"
  if [[ ! -d "$folder/site/torch" ]]; then
    local pip=("$python" -m pip install -q --target "$folder/site" --only-binary :all: --implementation cp --python-version "${version#python}"
      --platform manylinux_2_28_aarch64 --platform manylinux_2_17_aarch64 --platform manylinux2014_aarch64)
    # pip would evaluate torch's requirements for this machine, and find CUDA among them.
    "${pip[@]}" pip numpy "setuptools<82" ninja pytest pytest-xdist hypothesis expecttest filelock typing-extensions sympy networkx jinja2 fsspec
    "${pip[@]}" --no-deps "$torch"
    # ninja starts compilers alone: the one of this machine serves.
    rm -f "$folder/site/bin/ninja"
  fi
}

check_everything() {
  local folder root python tree
  folder="$(realpath "${1:-$(mktemp -d)}")"
  root="$folder/root"
  python="$([[ -x .venv/bin/python ]] && echo "$PWD/.venv/bin/python" || command -v python3)"
  tree="$folder/tree"
  set_up
  echo "arm64 root, torch and wrappers: $folder"
  mkdir -p "$tree"
  rm -rf "$tree"/{csrc,ascend_c,flashattn_ext,flashattn_ext_lab,tests,tools}
  cp -Rp setup.py pyproject.toml Makefile VERSION README.md build.sh csrc ascend_c flashattn_ext flashattn_ext_lab tests tools "$tree"
  find "$tree" -name '*.pyc' -delete
  rm -f "$tree"/flashattn_ext/_*.so
  cd "$tree"
  export FLASHATTN_EXT_TEST_TIMEOUT_S=1800 # of two ranks that emulate one processor each
  export PYTHONPATH="$folder/site" CXX="$folder/bin/c++" FLASHATTN_EXT_CUDA=0
  export PATH="$folder/bin:$(dirname "$python"):$PATH"
  python3 setup.py build_ext --inplace >build.log 2>&1 || { tail -20 build.log && exit 1; }
  python3 -m flashattn_ext doctor
  QEMU_CPU=neoverse-n1 python3 -m flashattn_ext doctor | grep -F "neon" # without bf16 instructions
  local isa
  grep -v integrations/test_transformers tests/quick.txt >quick.txt # transformers is not there
  python3 -m pytest -q -p no:cacheprovider --device cpu @quick.txt
  for isa in neon_bf16 neon generic; do
    FLASHATTN_EXT_ISA="$isa" python3 -m pytest -q -p no:cacheprovider --device cpu tests/kernels/test_fuzz.py tests/kernels/test_isa.py
  done
  tools/check_npu_binding.sh "$folder/bin/python3" || (($? == 2))
}

has_tools || install_tools
if ! has_tools; then
  echo "$0: not checked: no $cross or no qemu-aarch64, and no apt-get that installs them" >&2
  exit 2
fi
if [[ "${1:-}" == --kernels ]]; then
  check_kernels
elif [[ "${1:-}" == --cuda ]]; then
  check_cuda
else
  check_cuda
  check_everything "${1:-}"
fi
