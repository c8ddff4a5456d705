#!/usr/bin/env bash
# Runs everything that needs a GPU: build, tests, compute-sanitizer, `bench cuda`, the experiments with their report, and on request
# `bench tune`. For a machine with a CUDA torch, nvcc and compute-sanitizer. Logs and results go to OUTPUT_FOLDER (build/gpu_check).
#
#   tools/gpu_check.sh [OUTPUT_FOLDER] [build] [test] [sanitize] [bench] [experiments] [tune]
#
# On Hopper, TORCH_CUDA_ARCH_LIST=9.0a also compiles the kernels of cuda-sm80 for it, which the tests otherwise run from PTX.
# Without a step, all run except tune, which recompiles the kernels with other tiles. The tests run in parallel if
# pytest-xdist is installed. BENCH_ARGS go to `bench cuda`, EXPERIMENT_ARGS to `experiments all`.
set -uo pipefail
cd "$(dirname "$0")/.."
OUT=${1:-build/gpu_check}
shift || true
STEPS=${*:-build test sanitize bench experiments}
PYTHON=${PYTHON:-python3}
export PYTHONPATH=$PWD
mkdir -p "$OUT"
failed=0

step() { [[ " $STEPS " == *" $1 "* ]]; }
check() { # NAME COMMAND...: logs the command, prints the end of the log and whether it failed
  local name=$1
  shift
  "$@" >"$OUT/$name.log" 2>&1 || { failed=1 && echo "FAILED: $name"; }
  tail -n "${TAIL:-6}" "$OUT/$name.log"
}

if step build; then
  TAIL=1 check build bash -c "time FLASHATTN_EXT_CUDA=1 $PYTHON setup.py build_ext --inplace"
fi
if step test; then
  parallel=$($PYTHON -c 'import xdist' 2>/dev/null && echo "-n 10")
  # shellcheck disable=SC2086
  TAIL=12 check test env OMP_NUM_THREADS=2 OMP_WAIT_POLICY=passive "$PYTHON" -m pytest -q $parallel tests --device cuda
fi
if step sanitize; then
  names=()
  rm -f "$OUT/sanitize.failed"
  for tool in memcheck racecheck initcheck synccheck; do
    for dtype in float16 bfloat16 float32; do
      names+=("$tool.$dtype")
      compute-sanitizer --tool "$tool" --error-exitcode 1 "$PYTHON" tools/sanitizer_calls.py "$dtype" \
        >"$OUT/$tool.$dtype.log" 2>&1 || touch "$OUT/sanitize.failed" &
    done
  done
  wait
  (cd "$OUT" && for name in "${names[@]}"; do echo "$name:" && tail -n 2 "$name.log"; done)
  [[ ! -e "$OUT/sanitize.failed" ]] || { failed=1 && echo "FAILED: sanitize"; }
fi
if step bench; then
  # shellcheck disable=SC2086
  TAIL=80 check bench "$PYTHON" -m flashattn_ext bench cuda --markdown --json "$OUT/bench.json" ${BENCH_ARGS:-}
fi
if step tune; then
  TAIL=80 check tune "$PYTHON" -m flashattn_ext bench tune --device cuda --markdown --json "$OUT/tune.json"
fi
if step experiments; then
  # shellcheck disable=SC2086
  TAIL=2 check experiments "$PYTHON" -m flashattn_ext experiments all --device cuda --out "$OUT/experiments" ${EXPERIMENT_ARGS:-}
  TAIL=2 check report "$PYTHON" -m flashattn_ext report "$OUT/experiments"
fi
exit $failed
