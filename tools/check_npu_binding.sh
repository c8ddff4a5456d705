#!/usr/bin/env bash
# Compiles the torch_npu binding of ascend_c/npu against the headers of the torch-npu wheel for this torch, and links it with
# that wheel's library, which checks that every torch_npu symbol of the binding exists. tests/npu/device.cpp, built as well,
# stubs CANN's launchers and a few functions of its runtime: tests/ascend/test_npu_binding.py runs the binding with it.
#
#   tools/check_npu_binding.sh [PYTHON]      default: .venv/bin/python, else python3
#
# pip fetches the wheel once, into build/npu_binding. If no source has changed, the script does nothing. Exit status 2: the
# package index has no such wheel or cannot be reached, and nothing was checked. `.ci/run` then continues.
set -euo pipefail
cd "$(dirname "$0")/.."
python="${1:-$([[ -x .venv/bin/python ]] && echo .venv/bin/python || echo python3)}"
compiler="${CXX:-c++}"
folder=build/npu_binding
release="$("$python" -c 'import torch; print(torch.__version__.split("+")[0])')"
wheel="$folder/torch_npu-$release"

fetch() {
  local download="$folder/download"
  rm -rf "$download" && mkdir -p "$download"
  "$python" -m pip download -q --retries 1 --timeout 30 --no-deps --only-binary :all: -d "$download" "torch-npu==$release.*" >"$folder/pip.log" 2>&1 || {
    echo "the torch_npu binding was NOT checked: pip finds no wheel of torch-npu $release for this Python, or no package index:" >&2
    tail -3 "$folder/pip.log" >&2
    exit 2
  }
  "$python" - "$download" "$wheel.part" <<'UNPACK'
import sys, zipfile
from pathlib import Path

(path,) = Path(sys.argv[1]).glob("*.whl")
with zipfile.ZipFile(path) as archive:
    wanted = ("torch_npu/include/", "torch_npu/lib/libtorch_npu.so")
    archive.extractall(sys.argv[2], [name for name in archive.namelist() if name.startswith(wanted)])
UNPACK
  rm -rf "$download" && mv "$wheel.part" "$wheel"
}

mkdir -p "$folder"
[[ -d "$wheel" ]] || fetch
[[ ! -f "$wheel/checked" || -n "$(find ascend_c csrc tests/npu tools/*npu* -type f ! -name '*.pyc' -newer "$wheel/checked" -print -quit)" ]] || {
  echo "the torch_npu binding is unchanged since it was checked against torch-npu $release"
  exit 0
}
rm -f "$wheel/checked"
{ read -r _ && read -r abi && read -r includes && read -r libraries && read -r _; } < <("$python" tools/find_torch_npu.py "$wheel/torch_npu")
make -s -j "$(nproc)" emulator CXX="$compiler"

# Launchers as CANN 8 generates them.
launch="$wheel/launch"
rm -rf "$launch" && mkdir -p "$launch"
for kernel in $(grep -oE 'flash_\w+' ascend_c/kernel_list.h); do
  cat >"$launch/aclrtlaunch_$kernel.h" <<HEADER
#pragma once
#include <acl/acl.h>
#define ACLRT_LAUNCH_KERNEL(kernel) aclrtlaunch_##kernel
extern "C" uint32_t aclrtlaunch_$kernel(uint32_t blocks, aclrtStream stream, FlashattnBytes* arguments);
HEADER
done

flags=(-std=c++20 -O1 -fPIC -Wall -Wextra -Werror -I. -Icsrc -I"$launch" -DFLASHATTN_SOC='"Ascend910B1"'
  -D_GLIBCXX_USE_CXX11_ABI="$abi")
IFS=';' read -ra paths <<<"$includes"
for path in "${paths[@]}"; do flags+=(-isystem "$path"); done
compile() { # SOURCE OPTION...: in the background
  "$compiler" "${flags[@]}" "${@:2}" -c "$1" -o "$wheel/$(basename "$1" .cpp).o" &
  pids+=($!)
}
pids=()
for source in ascend_c/npu/{binding,backend,launch}.cpp ascend_c/dispatch.cpp; do compile "$source" -fvisibility=hidden; done
compile tests/npu/device.cpp -Iascend_c/emulator/include
for pid in "${pids[@]}"; do wait "$pid"; done

IFS=';' read -ra paths <<<"$libraries"
torch=("${paths[@]/#/-L}" -ltorch_cpu -lc10)
emulator=(build/emulator/kernels/*.o build/emulator/ascend_c/emulator/{machine,scheduler}.o)
"$compiler" -shared -o "$wheel/device.so" "$wheel/device.o" "${emulator[@]}" "${torch[@]}"
binding=("$wheel"/{binding,backend,launch,dispatch}.o)
"$compiler" -shared -o "$wheel/_ascend_npu.so" "${binding[@]}"
"$compiler" -shared -Wl,-z,defs -o "$wheel/linked.so" "${binding[@]}" "${paths[@]/#/-L}" -ltorch_npu "$wheel/device.so" "${torch[@]}"
# The stub may define only functions of CANN.
names() { nm -D "$@" | awk '{ sub(/@.*/, "", $NF); print $NF }' | sort -u; }
absent="$(comm -12 <(names -u "$wheel/_ascend_npu.so") <(names --defined-only "$wheel/device.so") |
  comm -23 - <(names --defined-only "$wheel/torch_npu/lib/libtorch_npu.so") | grep -v '^acl' || true)"
[[ -z "$absent" ]] || {
  echo "torch-npu $release does not have what the binding calls:" && c++filt <<<"$absent"
  exit 1
} >&2
touch "$wheel/checked"
echo "the torch_npu binding compiles and links against torch-npu $release (with a stub of CANN's launchers and runtime)"
