#!/usr/bin/env bash
# Compiles the CUDA sources for Ampere and Hopper, without torch and without a GPU, each for the architectures that csrc/sources.py
# gives it. Fails if a kernel spills more registers than its row in csrc/cuda/table/kernel_table.h allows. To save time, most of
# fp16 is left out (is_checked in csrc/sources.py). TILE_CHOICE=1 or 2 compiles with that tile of each row, whose spills have no limit.
# With --once, kernels that run on every GPU are compiled for the first architecture alone, several in one source, and host code that
# differs only in dtypes and head dims is given to the host compiler once: nvcc's own front end still checks all of it. Spills are then
# those of one source of each kind (read_sources in csrc/sources.py): all others, and kernels for sm_80 whose rows allow more than a few
# bytes, are compiled without optimisation, if this nvcc has an option for it: a sixth of their time.
#
#   tools/check_cuda_sources.sh [--once] [ARCHITECTURE...]      default: 80 90a
set -euo pipefail
cd "$(dirname "$0")/.."
objects=$(mktemp -d)
trap 'rm -rf "$objects"' EXIT
export nvcc=nvcc
write=write-checked
[[ "${1:-}" != --once ]] || { nvcc=nvcc-once && write=write-once && shift; }
targets=()
for number in ${*:-80 90a}; do targets+=("-gencode=arch=compute_$number,code=sm_$number"); done
# As a build with PTX, which lets Hopper run the kernels for all other GPUs.
[[ " ${*:-80 90a} " != *" 80 "* ]] || targets+=("-gencode=arch=compute_80,code=compute_80")
# torch compiles extensions without the implicit conversions of 16-bit types.
options=(-D__CUDA_NO_HALF_OPERATORS__ -D__CUDA_NO_HALF_CONVERSIONS__ -D__CUDA_NO_BFLOAT16_CONVERSIONS__ -D__CUDA_NO_HALF2_OPERATORS__)
options+=(-DFLASHATTN_EXT_SM90 "-DFLASHATTN_EXT_TILE_CHOICE=${TILE_CHOICE:-0}" -Icsrc "${targets[@]}")
# Not `grep -q`, which ends nvcc by a signal.
[[ "$nvcc" == nvcc ]] || ! nvcc --help | grep Ofast-compile >/dev/null || options+=(-Ofc=max)
export objects
compile() {
  local log
  log=$objects/$(basename "$1" .cu).$(basename "$(dirname "$1")").log
  python3 csrc/sources.py "$nvcc" nvcc -std=c++17 -O3 -Werror all-warnings -Xptxas=-v "${@:2}" -c "$1" -o "${log%.log}.o" \
    >"$log" 2>&1 || { cat "$log" && exit 255; }
}
export -f compile
python3 csrc/sources.py "$write" "$objects/instances" >"$objects/sources"
xargs -P "$(nproc)" -I{} bash -c 'compile "$@"' _ {} "${options[@]}" <"$objects/sources"
echo "all $(wc -l <"$objects/sources") CUDA sources compile"
# The limits of spills are those of the first tile of each row.
[[ "${TILE_CHOICE:-0}" != 0 ]] || python3 csrc/sources.py spills "$objects"/*.log
