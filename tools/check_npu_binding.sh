#!/usr/bin/env bash
# Compiles the torch_npu binding of ascend_c/npu against the headers of the torch-npu wheel that belongs to this torch, and
# links it with that wheel's library, so that every name of torch_npu that it uses is one that torch_npu has. What only CANN
# brings, its launchers and a few functions of its runtime, is stood in for by declarations made here.
#
#   tools/check_npu_binding.sh [PYTHON]      default: .venv/bin/python, else python3
#
# The wheel is fetched once, with pip, into build/npu_binding; the objects stay there for tests/test_npu_binding.py.
# Exit status 2: the package index has no such wheel or cannot be reached, and nothing was checked.
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
  "$python" -m pip download -q --no-deps --only-binary :all: -d "$download" "torch-npu==$release.*" >"$folder/pip.log" 2>&1 || {
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
{ read -r _ && read -r abi && read -r includes && read -r libraries; } < <("$python" tools/find_torch_npu.py "$wheel/torch_npu")

# Launchers as CANN 8 generates them, and functions of its runtime.
launch="$folder/launch"
rm -rf "$launch" && mkdir -p "$launch"
{
  echo '#include "ascend_c/arguments.h"'
  echo '#include <acl/acl.h>'
  for kernel in $(grep -oE 'flash_\w+' ascend_c/kernel_list.h); do
    header="$launch/aclrtlaunch_$kernel.h"
    {
      echo '#pragma once'
      echo '#include <acl/acl.h>'
      echo '#define ACLRT_LAUNCH_KERNEL(kernel) aclrtlaunch_##kernel'
      echo "extern \"C\" uint32_t aclrtlaunch_$kernel(uint32_t blocks, aclrtStream stream, FlashattnBytes* arguments);"
    } >"$header"
    echo "#include \"aclrtlaunch_$kernel.h\""
    echo "uint32_t aclrtlaunch_$kernel(uint32_t, aclrtStream, FlashattnBytes*) { return 0; }"
  done
  echo 'aclError aclrtGetDevice(int32_t*) { return 0; }'
  echo 'aclError aclGetDeviceCapability(uint32_t, aclDeviceInfo, int64_t*) { return 0; }'
  echo 'const char* aclrtGetSocName() { return nullptr; }'
} >"$launch/stand_in.cpp"

flags=(-std=c++20 -O1 -fPIC -fvisibility=hidden -Wall -Wextra -Werror -I. -I"$launch"
  -DFLASHATTN_SOC='"Ascend910B1"' -D_GLIBCXX_USE_CXX11_ABI="$abi")
IFS=';' read -ra paths <<<"$includes"
for path in "${paths[@]}"; do flags+=(-isystem "$path"); done
objects=()
pids=()
for source in ascend_c/npu/{binding,backend,launch}.cpp ascend_c/dispatch.cpp "$launch/stand_in.cpp"; do
  objects+=("$folder/$(basename "$source" .cpp).o")
  "$compiler" "${flags[@]}" -c "$source" -o "${objects[-1]}" &
  pids+=($!)
done
for pid in "${pids[@]}"; do wait "$pid"; done

IFS=';' read -ra paths <<<"$libraries"
"$compiler" -shared -Wl,-z,defs -o "$folder/linked.so" "${objects[@]}" "${paths[@]/#/-L}" -ltorch_npu -ltorch_cpu -lc10
echo "the torch_npu binding compiles and links against torch-npu $release (CANN's launchers and runtime stood in for)"
