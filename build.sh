#!/usr/bin/env bash
# Builds the Ascend C kernels: for an NPU with CANN, or for the emulator with nothing but a C++ compiler.
set -euo pipefail
cd "$(dirname "$0")"

# Names that users know, the SOC that stands for them, and its siblings (-soc picks one).
ARCHITECTURES=(
  "910      Ascend910B1    Atlas A2  Ascend910B1 Ascend910B2 Ascend910B2C Ascend910B3 Ascend910B4 Ascend910B4-1"
  "910b     Ascend910B1    Atlas A2  Ascend910B1 Ascend910B2 Ascend910B2C Ascend910B3 Ascend910B4 Ascend910B4-1"
  "910pro   Ascend910_9391 Atlas A3  Ascend910_9391 Ascend910_9392 Ascend910_9381 Ascend910_9382 Ascend910_9372 Ascend910_9362"
  "910_93   Ascend910_9391 Atlas A3  Ascend910_9391 Ascend910_9392 Ascend910_9381 Ascend910_9382 Ascend910_9372 Ascend910_9362"
)
FIRST_GENERATION="Ascend910A Ascend910B Ascend910ProA Ascend910ProB Ascend910PremiumA"
MINIMUM_CANN="8.0"

usage() {
  cat <<USAGE
usage: bash build.sh -arch NAME [-soc SOC] [-mode npu|emulator|check] [-j N] [-tilings] [-debug] [-clean]

  -mode npu       (default) the kernel library, with CANN $MINIMUM_CANN or newer (its torch_npu binding does not exist yet)
  -mode emulator  the backend ascend-emulator of the package: no NPU, no CANN
  -mode check     says what a build for an NPU would use, and builds nothing
  -soc SOC        another chip of the same architecture
  -j N            compilers at once (default: the number of cores)
  -tilings        with -mode emulator: other tilings of the forward as well, which the experiment \`tiles\` compares
  -debug          with checks and debug information
  -clean          removes what was built before

architectures:
USAGE
  local row name soc series generation siblings
  for row in "${ARCHITECTURES[@]}"; do
    read -r name soc series generation siblings <<<"$row"
    printf '  %-8s %s %s: %s\n' "$name" "$series" "$generation" "${siblings// /, }"
  done
  echo "  first-generation chips ($FIRST_GENERATION) have another kind of core and are not supported"
}

fail() {
  echo "build.sh: $1" >&2
  exit "${2:-1}"
}

known_names() { for row in "${ARCHITECTURES[@]}"; do echo "${row%% *}"; done | paste -sd, | sed 's/,/, /g'; }

# Sets SOC from -arch and -soc, or says why not.
choose_soc() {
  local row name short soc series generation siblings
  for name in $FIRST_GENERATION; do
    short="${name#Ascend}"
    # "910b" is what users call Atlas A2; the SOC Ascend910B is older.
    if [[ "${ARCH,,}" == "${name,,}" || "${SOC_NAME,,}" == "${name,,}" || ("${ARCH,,}" == "${short,,}" && "$short" != 910B) ]]; then
      fail "$name is a first-generation chip: its cube and vector units share a core, and it has no bf16, so that these \
kernels cannot run on it. Supported: $(known_names). (An Atlas A2 reports itself as 910B1 to 910B4: use -arch 910b.)"
    fi
  done
  for row in "${ARCHITECTURES[@]}"; do
    read -r name soc series generation siblings <<<"$row"
    [[ "${ARCH,,}" == "$name" ]] || continue
    SOC="${SOC_NAME:-$soc}"
    [[ " $siblings " == *" $SOC "* ]] || fail "-soc: '$SOC' is not of $series $generation; accepted are ${siblings// /, }"
    echo "-arch $name: $series $generation, built for $SOC"
    return
  done
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

build_npu() {
  command -v cmake >/dev/null || fail "cmake is missing: install it (pip install cmake)" 2
  cmake -S ascend_c -B build/npu -DSOC_VERSION="$SOC" -DASCEND_CANN_PACKAGE_PATH="$CANN" -DCANN_VERSION="$CANN_VERSION" \
    -DCMAKE_BUILD_TYPE="$([[ $DEBUG == 1 ]] && echo Debug || echo Release)"
  cmake --build build/npu -j "$JOBS"
  echo "the kernels are in build/npu/libflashattn_ext_ascend.so; a torch_npu binding does not exist yet"
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
  rm -rf build/npu build/emulator build/tilings flashattn_ext/_ascend_emulator*.so
  [[ -n "$ARCH" ]] || exit 0
fi
[[ -n "$ARCH" ]] || fail "-arch is missing; accepted are $(known_names)"
[[ "$TARGET" == emulator || "$MODE" == emulator ]] || fail "-tilings goes with -mode emulator, got -mode $MODE"
choose_soc
case "$MODE" in
  npu) find_cann && build_npu ;;
  check) find_cann ;;
  emulator)
    # The emulator has no architecture of its own: A2 and A3 are the same core.
    make -j "$JOBS" "$TARGET" ${CXX:+CXX="$CXX"} $([[ $DEBUG == 1 ]] && echo 'EMULATOR_OPTIMISE=-O0 -g')
    echo "built flashattn_ext/_ascend_emulator.so: flashattn_ext.use_backend(\"ascend-emulator\")"
    ;;
  *) fail "-mode: '$MODE' is unknown; accepted are npu, emulator, check" ;;
esac
