#!/usr/bin/env bash
# Compiles the CUDA sources for Ampere and Hopper, without torch and without a GPU. Fails when a kernel of head_dim 64 or 128 spills
# registers. Kernels of a Mask or of options found out at run time (kinds 2 to 5 of csrc/cuda/common/kind.h) may, and so may those that
# decode from caches of fp32; those with dropout (kind 1) may spill 8 bytes. To save time sm90/ is compiled for 90a alone, of the kinds
# that are in sources of their own those of sm80/ for the first architecture alone, and bf16 stands for fp16 but for common kinds of 64
# and 128.
# TILE_CHOICE=1 or 2: with the tiles of that column of csrc/cuda/*/tiles.h.
#
#   tools/check_cuda_sources.sh [ARCHITECTURE...]      default: 80 90a
set -euo pipefail
cd "$(dirname "$0")/.."
objects=$(mktemp -d)
trap 'rm -rf "$objects"' EXIT
architectures=${*:-80 90a}
# torch compiles extensions without the implicit conversions of 16-bit types.
options=(-D__CUDA_NO_HALF_OPERATORS__ -D__CUDA_NO_HALF_CONVERSIONS__ -D__CUDA_NO_BFLOAT16_CONVERSIONS__ -D__CUDA_NO_HALF2_OPERATORS__)
options+=(-DFLASHATTN_EXT_SM90 "-DFLASHATTN_EXT_TILE_CHOICE=${TILE_CHOICE:-0}" -Icsrc)
sources() { python3 csrc/sources.py "$objects/instances"; }
export objects architectures
compile() {
  local name=${1//\//_} number targets=()
  for number in $architectures; do
    case $name in
      *sm80_*_fp16_64.cu | *sm80_*_fp16_128.cu) ;;
      *sm90_*_fp16_64.cu | *sm90_*_fp16_128.cu) [[ $number == 90a ]] || continue ;;
      *_fp16_*) continue ;;
      *sm90_*) [[ $number == 90a ]] || continue ;;
      *_masks.cu | *_general.cu) [[ $number == "${architectures%% *}" ]] || continue ;;
    esac
    targets+=("-gencode=arch=compute_$number,code=sm_$number")
  done
  ((${#targets[@]})) || return 0
  nvcc -std=c++17 -O3 -Werror all-warnings -Xptxas -v "${targets[@]}" "${@:2}" -c "$1" -o "$objects/$name.o" >"$objects/$name.log" 2>&1 ||
    { cat "$objects/$name.log" && exit 255; }
}
export -f compile
sources | xargs -P "$(nproc)" -I{} bash -c 'compile "$@"' _ {} "${options[@]}"
echo "$(find "$objects" -name '*.log' | wc -l) of $(sources | wc -l) CUDA sources compile; checking kernels of head_dim 64 and 128 for spills"
awk '
  /Compiling entry function/ { kernel = $0 }
  /bytes spill stores/ {
    sub(/.*stack frame, /, "")
    allowed = kernel ~ /KindE1E/ ? 8 : 0
    if (kernel ~ /Li(64|128)E/ && kernel !~ /KindE[2345]E|decode12split_kernelIf/ && $1 > allowed) { print "spills " $1 " bytes: " kernel; failed = 1 }
  }
  END { exit failed }' "$objects"/*.log
