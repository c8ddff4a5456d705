#!/usr/bin/env bash
# Builds a release wheel for one minor version of torch: flashattn_ext-0.1.0+cputorch2.13-cp311-..., or +cu13torch2.13
# with the CUDA kernels. It builds from a source distribution, in an environment with only torch and the build tools.
#
#   tools/build_wheel.sh cpu|cuda TORCH_MINOR FOLDER      for example: tools/build_wheel.sh cpu 2.13 dist
#
# PYTHON is the interpreter that the wheel is for (default: python3). A cpu wheel gets a manylinux tag from auditwheel
# if patchelf is available; a cuda wheel keeps the tag linux_x86_64, like the wheels of flash-attn.
set -euo pipefail
cd "$(dirname "$0")/.."
kind=${1:?cpu or cuda} torch=${2:?minor version of torch} folder=${3:?folder for the wheel}
case $kind in cpu | cuda) ;; *) echo "build_wheel: '$kind' is neither cpu nor cuda" >&2 && exit 2 ;; esac
mkdir -p "$folder"
out=$(cd "$folder" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

"${PYTHON:-python3}" -m venv "$work/env"
python=$work/env/bin/python
"$python" -m pip install -q --upgrade pip
"$python" -m pip install -q build "setuptools>=64" wheel ninja "torch==$torch.*"

"$python" -m build --sdist --no-isolation --outdir "$work" .
mkdir "$work/source"
tar xzf "$work"/flashattn_ext-*.tar.gz -C "$work/source" --strip-components=1
if [[ $kind == cuda ]]; then
  label=cu$("$python" -c 'import torch; print(torch.version.cuda.split(".")[0])')
  export FLASHATTN_EXT_CUDA=1
else
  label=cpu
  export FLASHATTN_EXT_CUDA=0
fi
version=$(<VERSION)
echo "$version+${label}torch$torch" >"$work/source/VERSION"
"$python" -m pip wheel -q --no-build-isolation --no-deps -w "$work/wheels" "$work/source"

if [[ $kind == cpu ]]; then
  # torch provides its libraries and OpenMP runtime: the wheel must not bundle copies of them.
  "$python" -m pip install -q auditwheel patchelf
  PATH=$work/env/bin:$PATH "$python" -m auditwheel repair --wheel-dir "$work/repaired" --exclude 'libtorch*' --exclude 'libc10*' --exclude 'libgomp*' \
    "$work"/wheels/*.whl
  mv "$work"/repaired/*.whl "$out/"
else
  mv "$work"/wheels/*.whl "$out/"
fi
ls -l "$out"
