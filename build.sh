#!/usr/bin/env bash
# Builds the Ascend C kernels: for an NPU with CANN, or for the emulator, which needs only a C++ compiler.
set -euo pipefail
cd "$(dirname "$0")"

# Rows of the table of architectures, which the library also checks the device against: name, SOC, series, SOCs of the
# series; quoted.
ARCHITECTURE_ROWS() { sed -n 's/^ARCHITECTURE(\(.*\))$/\1/p' ascend_c/npu/architectures.def | sed 's/", "/"\t"/g; s/"//g'; }
FIRST_GENERATION="$(sed -n 's/^FIRST_GENERATION("\(.*\)")$/\1/p' ascend_c/npu/architectures.def)"
MINIMUM_CANN="8.5"
MINIMUM_CMAKE="3.16"
REPORT="build/npu_report.txt"

usage() {
  cat <<USAGE
usage: bash build.sh -arch NAME [-soc SOC] [-mode npu|emulator|check] [-j N] [-debug] [-clean]

  -mode npu       (default) the backend ascend of the package, kernels and torch_npu binding: with CANN $MINIMUM_CANN or newer, CMake
                  $MINIMUM_CMAKE or newer, a compiler of C++20 (\$CXX) and the torch_npu of the torch of \$PYTHON (python3). It has
                  never run with a CANN installation; if a step fails, attach $REPORT to a bug report
  -mode emulator  the backend ascend-emulator of the package: no NPU, no CANN
  -mode check     checks the requirements of -mode npu, prints what it found, and builds nothing
  -soc SOC        another chip of the same architecture, if NAME is one
  -j N            parallel compiler processes (default: the number of cores)
  -debug          with debug information and without optimisation; for an NPU also with CANN's own checks of arguments on the
                  device (ASCENDC_DEBUG), which slow the kernels down; recompiles the whole emulator
  -clean          removes what was built before

NAME is an architecture of this list, or one of its chips as npu-smi prints it: 910B3, 910B4-1, 910_9392 (in any case; Ascend
in front may be left out):
USAGE
  local name soc series siblings
  while IFS=$'\t' read -r name soc series siblings; do
    printf '  %-8s %s: %s\n' "$name" "$series" "${siblings// /, }"
  done < <(ARCHITECTURE_ROWS)
  echo "not supported is the first generation, whose chips have no digit after the letter: ${FIRST_GENERATION// /, }"
}

fail() {
  echo "build.sh: $1" >&2
  exit "${2:-1}"
}

known_names() { ARCHITECTURE_ROWS | cut -f1 | paste -sd, | sed 's/,/, /g'; }

# The SOC that a name such as 910b3 or ASCEND910B3 stands for among the SOCs that follow it; nothing if none.
soc_named() {
  local wanted="${1,,}" soc
  for soc in "${@:2}"; do
    if [[ "ascend${wanted#ascend}" == "${soc,,}" ]]; then echo "$soc"; fi
  done
}

# Sets SOC from -arch and -soc, or fails with the reason.
choose_soc() {
  local name short soc series siblings chip asked
  for name in $FIRST_GENERATION; do
    short="${name#Ascend}"
    # "910b" is what users call Atlas A2; the SOC Ascend910B is older.
    if [[ "${ARCH,,}" == "${name,,}" || "${SOC_NAME,,}" == "${name,,}" || ("${ARCH,,}" == "${short,,}" && "$short" != 910B) ]]; then
      fail "$name is a first-generation chip: its cube and vector units share a core, and it has no bf16, so that these \
kernels cannot run on it. Supported: $(known_names). (An Atlas A2 reports itself as 910B1 to 910B4: use -arch 910b, or that name.)"
    fi
  done
  while IFS=$'\t' read -r name soc series siblings; do
    # shellcheck disable=SC2086
    chip="$(soc_named "$ARCH" $siblings)"
    [[ "${ARCH,,}" == "$name" || -n "$chip" ]] || continue
    SOC="${chip:-$soc}"
    if [[ -n "$SOC_NAME" ]]; then
      # shellcheck disable=SC2086
      asked="$(soc_named "$SOC_NAME" $siblings)"
      [[ -n "$asked" ]] || fail "-soc: '$SOC_NAME' is not of $series; accepted are ${siblings// /, }"
      [[ -z "$chip" || "$asked" == "$chip" ]] || fail "-arch names the chip $chip and -soc names $asked: give one of them"
      SOC="$asked"
    fi
    echo "-arch $ARCH: $series, built for $SOC"
    return
  done < <(ARCHITECTURE_ROWS)
  fail "-arch: '$ARCH' is unknown; accepted are $(known_names), and names of their chips as npu-smi prints them, such as 910B3"
}

is_at_least() { [[ "$(printf '%s\n' "$1" "$2" | sort -V | head -1)" == "$1" ]]; }

CANN_PLACES=("${ASCEND_HOME_PATH:-}" "${ASCEND_TOOLKIT_HOME:-}" /usr/local/Ascend/ascend-toolkit/latest
  /usr/local/Ascend/cann /usr/local/Ascend/latest "$HOME/Ascend/ascend-toolkit/latest" "$HOME/Ascend/cann")

# Sets CANN and CANN_VERSION, or exits with code 2 and a message that names what is missing.
find_cann() {
  local place file looked=""
  for place in "${CANN_PLACES[@]}"; do
    [[ -n "$place" ]] || continue
    looked+="${looked:+, }$place"
    for file in "$place/version.cfg" "$place"/*/ascend_toolkit_install.info "$place/compiler/version.info"; do
      [[ -f "$file" ]] || continue
      CANN_VERSION="$(grep -oiE 'version=[^0-9]*[0-9]+(\.[0-9]+)+' "$file" | head -1 | grep -oE '[0-9]+(\.[0-9]+)+' || true)"
      [[ -n "$CANN_VERSION" ]] && CANN="$place" && break 2
    done
  done
  [[ -n "${CANN:-}" ]] || fail "CANN was not found: looked in $looked (ASCEND_HOME_PATH names another place). Install the \
CANN toolkit $MINIMUM_CANN or newer and source its set_env.sh, or build for the emulator: bash build.sh -arch $ARCH -mode emulator" 2
  is_at_least "$MINIMUM_CANN" "$CANN_VERSION" ||
    fail "CANN $CANN_VERSION in $CANN is too old; $MINIMUM_CANN or newer is needed" 2
  # Links of the toolkit may form a loop, which find reports as a failure.
  COMPILER="$(find -L "$CANN" -maxdepth 5 -type f -name bisheng 2>/dev/null | head -1 || true)"
  [[ -n "$COMPILER" ]] || fail "the compiler bisheng is missing in $CANN (version $CANN_VERSION): install the whole CANN toolkit, \
or build for the emulator: bash build.sh -arch $ARCH -mode emulator" 2
  echo "CANN $CANN_VERSION in $CANN, compiler $COMPILER"
}

# Checks CMake and the host compiler, which is CMake's default: $CXX, or c++.
find_cmake_and_compiler() {
  local version compiler="${CXX:-c++}"
  version="$(cmake --version 2>/dev/null | grep -oE '[0-9]+(\.[0-9]+)+' | head -1 || true)"
  [[ -n "$version" ]] || fail "cmake is missing: install it (pip install cmake)" 2
  is_at_least "$MINIMUM_CMAKE" "$version" || fail "cmake $version is too old; $MINIMUM_CMAKE or newer is needed (pip install cmake)" 2
  # Unquoted, because CXX may contain options. shellcheck disable=SC2086
  $compiler -std=c++20 -x c++ -fsyntax-only /dev/null 2>/dev/null ||
    fail "$compiler does not compile C++20, which the headers of torch are written in: install g++ 11 or newer, or set CXX" 2
  # shellcheck disable=SC2086
  echo "CMake $version, compiler $($compiler --version | head -1)"
}

PYTHON="${PYTHON:-python3}"

# Sets TORCH_VERSION, CXX11_ABI, INCLUDES and LIBRARIES of torch and torch_npu, or exits with code 2 and a message that
# names what is missing. torch_npu is located but not imported, which could need a driver.
find_torch_npu() {
  local found npu
  command -v "$PYTHON" >/dev/null || fail "$PYTHON was not found: PYTHON names the interpreter that has torch and torch_npu" 2
  found="$(TORCH_DEVICE_BACKEND_AUTOLOAD=0 "$PYTHON" tools/find_torch_npu.py)" || fail "$found" 2
  { read -r TORCH_VERSION && read -r CXX11_ABI && read -r INCLUDES && read -r LIBRARIES && read -r npu; } <<<"$found"
  echo "torch $TORCH_VERSION and its torch_npu $npu, of $PYTHON"
}

# Runs a step; its output goes to the terminal and the log.
step() {
  STEP="$1"
  "${@:2}" 2>&1 | tee -a "$LOG"
}

build_npu() {
  LOG=build/npu.log
  mkdir -p build && : >"$LOG"
  export ASCEND_HOME_PATH="$CANN"  # CANN's own CMake files look there
  step "configuring with CMake" cmake -S ascend_c -B build/npu -DSOC_VERSION="$SOC" -DASCEND_CANN_PACKAGE_PATH="$CANN" \
    -DCANN_VERSION="$CANN_VERSION" -DTORCH_CXX11_ABI="$CXX11_ABI" -DPYTHON_INCLUDES="$INCLUDES" -DPYTHON_LIBRARIES="$LIBRARIES" \
    -DCMAKE_BUILD_TYPE="$([[ $DEBUG == 1 ]] && echo Debug || echo Release)"
  step "compiling and linking" cmake --build build/npu -j "$JOBS" --verbose
  step "copying the library into the package" cp build/npu/_ascend_npu.so flashattn_ext/
  # A module that is readable without loading the library.
  printf '"""Written by build.sh."""\n\nBUILT_FOR_TORCH = "%s"\nSOC = "%s"\nCANN = "%s"\n' \
    "$TORCH_VERSION" "$SOC" "$CANN_VERSION" >flashattn_ext/_ascend_config.py
  echo "built flashattn_ext/_ascend_npu.so: tensors on an NPU, flashattn_ext.use_backend(\"ascend\"). To add it to a package
installed elsewhere: pip install --no-build-isolation --force-reinstall --no-deps . Then: $PYTHON -m flashattn_ext doctor"
}

# One section of the report: a title and the output of a command, or that it failed.
part() {
  echo "--- $1"
  "${@:2}" 2>&1 || echo "(failed)"
  echo
}

# Writes everything that a bug report needs to diagnose a failed build.
write_report() {
  local file
  mkdir -p build
  {
    part "build.sh $ORDER: failed at: $STEP" echo "flashattn_ext $(cat VERSION 2>/dev/null), $(git describe --always --dirty 2>/dev/null || echo no git)"
    part "system" uname -srm
    part "distribution" grep PRETTY_NAME /etc/os-release
    part "CANN ${CANN_VERSION:-not found} in ${CANN:-}" bash -c 'find -L "$0" -maxdepth 2 \( -name "*.info" -o -name "version.cfg" \) -exec tail -n +1 {} +' "${CANN:-/nonexistent}"
    part "bisheng" "${COMPILER:-bisheng}" --version
    part "cmake" cmake --version
    # shellcheck disable=SC2086
    part "compiler ${CXX:-c++}" ${CXX:-c++} --version
    part "python $PYTHON" "$PYTHON" --version
    part "packages" bash -c '"$0" -m pip list 2>/dev/null | grep -iE "^(torch|numpy|cmake|flashattn)"' "$PYTHON"
    part "environment" bash -c 'env | grep -E "^(ASCEND|LD_LIBRARY_PATH|CXX|CC|PATH|PYTHON|TORCH)" | sort'
    part "npu-smi" npu-smi info
    part "log" cat "$LOG"
    for file in build/npu/CMakeCache.txt build/npu/CMakeFiles/CMake{Error.log,ConfigureLog.yaml}; do
      [[ ! -f "$file" ]] || part "$file" cat "$file"
    done
  } >"$REPORT"
  echo "build.sh: failed at: $STEP. Attach $REPORT to a bug report; docs/ascend_first_run.md says where to send it" >&2
}

ORDER="$*"
ARCH="" SOC_NAME="" MODE=npu JOBS="$(nproc 2>/dev/null || echo 2)" DEBUG=0 CLEAN=0
while (($#)); do
  case "$1" in
    -arch | -soc | -mode | -j)
      (($# > 1)) || fail "$1 needs a value; bash build.sh -help lists them"
      case "$1" in -arch) ARCH="$2" ;; -soc) SOC_NAME="$2" ;; -mode) MODE="$2" ;; -j) JOBS="$2" ;; esac
      shift 2
      ;;
    -debug) DEBUG=1 && shift ;;
    -clean) CLEAN=1 && shift ;;
    -h | -help | --help) usage && exit 0 ;;
    *) fail "unknown option '$1'; bash build.sh -help lists them" ;;
  esac
done
[[ "$JOBS" =~ ^[1-9][0-9]*$ ]] || fail "-j: expected a whole number from 1, got '$JOBS'"
if [[ $CLEAN == 1 ]]; then
  rm -rf build/npu build/npu.log "$REPORT" build/emulator flashattn_ext/_ascend_emulator*.so flashattn_ext/_ascend_npu.so \
    flashattn_ext/_ascend_config.py
  [[ -n "$ARCH" ]] || exit 0
fi
[[ -n "$ARCH" ]] || fail "-arch is missing; accepted are $(known_names)"
choose_soc
case "$MODE" in
  npu | check)
    STEP="looking for what the build needs" LOG=/dev/null
    if [[ "$MODE" == npu ]]; then trap '(($? == 0)) || write_report' EXIT; fi
    find_cann
    find_cmake_and_compiler
    find_torch_npu
    if [[ "$MODE" == npu ]]; then build_npu; fi
    ;;
  emulator)
    # The emulator does not depend on the architecture: A2 and A3 have the same cores. make does not detect changed
    # options, so -debug recompiles everything.
    options=(${CXX:+CXX="$CXX"})
    if [[ $DEBUG == 1 ]]; then options+=(-B "EMULATOR_OPTIMISE=-O0 -g"); fi
    make -j "$JOBS" emulator "${options[@]}"
    echo "built flashattn_ext/_ascend_emulator.so: flashattn_ext.use_backend(\"ascend-emulator\")"
    ;;
  *) fail "-mode: '$MODE' is unknown; accepted are npu, emulator, check" ;;
esac
