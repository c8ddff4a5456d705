#!/usr/bin/env bash
# Builds the Ascend C kernels: for an NPU with CANN, or for the emulator with nothing but a C++ compiler.
set -euo pipefail
cd "$(dirname "$0")"

# Rows of the table, which the library checks the device against too: name, SOC, series, SOCs of the series; quoted.
ARCHITECTURE_ROWS() { sed -n 's/^ARCHITECTURE(\(.*\))$/\1/p' ascend_c/npu/architectures.def | sed 's/", "/"\t"/g; s/"//g'; }
FIRST_GENERATION="$(sed -n 's/^FIRST_GENERATION("\(.*\)")$/\1/p' ascend_c/npu/architectures.def)"
MINIMUM_CANN="8.0"

usage() {
  cat <<USAGE
usage: bash build.sh -arch NAME [-soc SOC] [-mode npu|emulator|check] [-j N] [-tilings] [-debug] [-clean]

  -mode npu       (default) the backend ascend of the package, kernels and torch_npu binding: with CANN $MINIMUM_CANN or newer and
                  the torch_npu of the torch of \$PYTHON (python3). It has never met a CANN installation
  -mode emulator  the backend ascend-emulator of the package: no NPU, no CANN
  -mode check     says what a build for an NPU would use, and builds nothing
  -soc SOC        another chip of the same architecture
  -j N            compilers at once (default: the number of cores)
  -tilings        with -mode emulator: other tilings of the forward as well, which the experiment \`tiles\` compares
  -debug          with debug information and without optimisation; the emulator is compiled anew
  -clean          removes what was built before

architectures:
USAGE
  local name soc series siblings
  while IFS=$'\t' read -r name soc series siblings; do
    printf '  %-8s %s: %s\n' "$name" "$series" "${siblings// /, }"
  done < <(ARCHITECTURE_ROWS)
  echo "  first-generation chips ($FIRST_GENERATION) have another kind of core and are not supported"
}

fail() {
  echo "build.sh: $1" >&2
  exit "${2:-1}"
}

known_names() { ARCHITECTURE_ROWS | cut -f1 | paste -sd, | sed 's/,/, /g'; }

# Sets SOC from -arch and -soc, or says why not.
choose_soc() {
  local name short soc series siblings
  for name in $FIRST_GENERATION; do
    short="${name#Ascend}"
    # "910b" is what users call Atlas A2; the SOC Ascend910B is older.
    if [[ "${ARCH,,}" == "${name,,}" || "${SOC_NAME,,}" == "${name,,}" || ("${ARCH,,}" == "${short,,}" && "$short" != 910B) ]]; then
      fail "$name is a first-generation chip: its cube and vector units share a core, and it has no bf16, so that these \
kernels cannot run on it. Supported: $(known_names). (An Atlas A2 reports itself as 910B1 to 910B4: use -arch 910b.)"
    fi
  done
  while IFS=$'\t' read -r name soc series siblings; do
    [[ "${ARCH,,}" == "$name" ]] || continue
    SOC="${SOC_NAME:-$soc}"
    [[ " $siblings " == *" $SOC "* ]] || fail "-soc: '$SOC' is not of $series; accepted are ${siblings// /, }"
    echo "-arch $name: $series, built for $SOC"
    return
  done < <(ARCHITECTURE_ROWS)
  fail "-arch: '$ARCH' is unknown; accepted are $(known_names)"
}

CANN_PLACES=("${ASCEND_HOME_PATH:-}" "${ASCEND_TOOLKIT_HOME:-}" /usr/local/Ascend/ascend-toolkit/latest
  /usr/local/Ascend/cann /usr/local/Ascend/latest "$HOME/Ascend/ascend-toolkit/latest" "$HOME/Ascend/cann")

# Sets CANN and CANN_VERSION, or ends with code 2 and what is missing.
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
  [[ "$(printf '%s\n' "$MINIMUM_CANN" "$CANN_VERSION" | sort -V | head -1)" == "$MINIMUM_CANN" ]] ||
    fail "CANN $CANN_VERSION in $CANN is too old; $MINIMUM_CANN or newer is needed" 2
  COMPILER="$(find -L "$CANN" -maxdepth 5 -type f -name bisheng 2>/dev/null | head -1)"
  [[ -n "$COMPILER" ]] || fail "the compiler bisheng is missing in $CANN (version $CANN_VERSION): install the whole CANN toolkit, \
or build for the emulator: bash build.sh -arch $ARCH -mode emulator" 2
  echo "CANN $CANN_VERSION in $CANN, compiler $COMPILER"
}

PYTHON="${PYTHON:-python3}"

# Sets TORCH_VERSION, CXX11_ABI, INCLUDES and LIBRARIES of torch and torch_npu, or ends with code 2 and what is missing.
# torch_npu is looked at, not imported: that could need a driver.
find_torch_npu() {
  local found
  command -v "$PYTHON" >/dev/null || fail "$PYTHON was not found: PYTHON names the interpreter that has torch and torch_npu" 2
  found="$(TORCH_DEVICE_BACKEND_AUTOLOAD=0 "$PYTHON" tools/find_torch_npu.py)" || fail "$found" 2
  { read -r TORCH_VERSION && read -r CXX11_ABI && read -r INCLUDES && read -r LIBRARIES; } <<<"$found"
  echo "torch $TORCH_VERSION and its torch_npu, of $PYTHON"
}

build_npu() {
  command -v cmake >/dev/null || fail "cmake is missing: install it (pip install cmake)" 2
  export ASCEND_HOME_PATH="$CANN"  # CANN's own CMake files look there
  cmake -S ascend_c -B build/npu -DSOC_VERSION="$SOC" -DASCEND_CANN_PACKAGE_PATH="$CANN" -DCANN_VERSION="$CANN_VERSION" \
    -DTORCH_CXX11_ABI="$CXX11_ABI" -DPYTHON_INCLUDES="$INCLUDES" -DPYTHON_LIBRARIES="$LIBRARIES" \
    -DCMAKE_BUILD_TYPE="$([[ $DEBUG == 1 ]] && echo Debug || echo Release)"
  cmake --build build/npu -j "$JOBS"
  cp build/npu/_ascend_npu.so flashattn_ext/
  # Can be read without loading the library.
  printf '"""Written by build.sh."""\n\nBUILT_FOR_TORCH = "%s"\nSOC = "%s"\nCANN = "%s"\n' \
    "$TORCH_VERSION" "$SOC" "$CANN_VERSION" >flashattn_ext/_ascend_config.py
  echo "built flashattn_ext/_ascend_npu.so: tensors on an NPU, flashattn_ext.use_backend(\"ascend\"). A package that is
installed elsewhere gets it by: pip install --no-build-isolation --force-reinstall --no-deps ."
}

ARCH="" SOC_NAME="" MODE=npu TARGET=emulator JOBS="$(nproc 2>/dev/null || echo 2)" DEBUG=0 CLEAN=0
while (($#)); do
  case "$1" in
    -arch | -soc | -mode | -j)
      (($# > 1)) || fail "$1 needs a value; bash build.sh -help lists them"
      case "$1" in -arch) ARCH="$2" ;; -soc) SOC_NAME="$2" ;; -mode) MODE="$2" ;; -j) JOBS="$2" ;; esac
      shift 2
      ;;
    -tilings) TARGET=emulator-tilings && shift ;;
    -debug) DEBUG=1 && shift ;;
    -clean) CLEAN=1 && shift ;;
    -h | -help | --help) usage && exit 0 ;;
    *) fail "unknown option '$1'; bash build.sh -help lists them" ;;
  esac
done
[[ "$JOBS" =~ ^[1-9][0-9]*$ ]] || fail "-j: expected a whole number from 1, got '$JOBS'"
if [[ $CLEAN == 1 ]]; then
  rm -rf build/npu build/emulator build/tilings flashattn_ext/_ascend_emulator*.so flashattn_ext/_ascend_npu.so \
    flashattn_ext/_ascend_config.py
  [[ -n "$ARCH" ]] || exit 0
fi
[[ -n "$ARCH" ]] || fail "-arch is missing; accepted are $(known_names)"
[[ "$TARGET" == emulator || "$MODE" == emulator ]] || fail "-tilings goes with -mode emulator, got -mode $MODE"
choose_soc
case "$MODE" in
  npu) find_cann && find_torch_npu && build_npu ;;
  check) find_cann && find_torch_npu ;;
  emulator)
    # The emulator has no architecture of its own: A2 and A3 are the same core.
    # make does not see that options are others: with -debug it compiles everything again.
    options=(${CXX:+CXX="$CXX"})
    if [[ $DEBUG == 1 ]]; then options+=(-B "EMULATOR_OPTIMISE=-O0 -g"); fi
    make -j "$JOBS" "$TARGET" "${options[@]}"
    echo "built flashattn_ext/_ascend_emulator.so: flashattn_ext.use_backend(\"ascend-emulator\")"
    ;;
  *) fail "-mode: '$MODE' is unknown; accepted are npu, emulator, check" ;;
esac
