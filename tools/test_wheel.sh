#!/usr/bin/env bash
# Installs a wheel into an environment with torch but without compiler and checkout, and runs the quick tests
# (tests/quick.txt) outside the checkout. Then it simulates a mismatched torch: the import must fail with a one-line message.
#
#   tools/test_wheel.sh WHEEL TORCH_MINOR
set -euo pipefail
wheel=$(realpath "${1:?a wheel}") torch=${2:?minor version of torch}
root=$(cd "$(dirname "$0")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

"${PYTHON:-python3}" -m venv "$work/env"
python=$work/env/bin/python
"$python" -m pip install -q --upgrade pip
"$python" -m pip install -q "torch==$torch.*" numpy pytest pytest-xdist hypothesis expecttest transformers accelerate
"$python" -m pip install -q --no-deps "$wheel"

mkdir "$work/away"
cp -r "$root/tests" "$work/away/tests"
cd "$work/away"
# Inductor, which some of the tests call, needs a compiler; the package does not. Tests of the compiler are left out, and CXX
# names a program that fails, so that any compilation is noticed.
CXX=/bin/false CC=/bin/false OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive "$python" -m pytest -q -n 2 --dist loadfile --device cpu \
  -p no:cacheprovider @tests/quick.txt

config=$("$python" -c 'from flashattn_ext import _build_config; print(_build_config.__file__)')
sed -i 's/^BUILT_FOR_TORCH = .*/BUILT_FOR_TORCH = "1.0.0"/' "$config"
message=$("$python" -c '
try:
    import flashattn_ext
except RuntimeError as error:
    print(error)
')
[[ $(wc -l <<<"$message") == 1 && $message == *"was built for torch 1.0.0, but torch $torch"* ]] ||
  { echo "test_wheel: unexpected message for a mismatched torch: $message" >&2 && exit 1; }
echo "$message"
