// The stages of stages.def in C++: their names, the declarations of their functions, and which functions a row has.
// Each compiled source instantiates the functions of some rows.
#pragma once

#include <cstddef>

#include "cuda/table/kernel_table.h"
#include "derivative_params.h"

namespace flashattn_ext {

struct BackwardWorkspace;
struct ChunkPartials;
namespace decode {
struct BackwardPlan;
struct Plan;
}  // namespace decode

enum class Stage {
  kNone,
#define STAGE(architecture, array, stage, header, entries) array,
#include "cuda/table/stages.def"
};

#define STAGE(architecture, array, stage, header, entries) \
  namespace architecture {                                 \
  entries                                                  \
  }
#define SM80_ENTRY(result, name, parameters)         \
  template <class T, int kHeadDim, Options kOptions> \
  result name parameters;
#define SM90_ENTRY(result, name, parameters)                        \
  template <class T, int kHeadDim, Options kOptions, int kHeadDimV> \
  result name parameters;
#define DECODE_ENTRY(result, name, parameters) \
  template <class T, int kHeadDim, int kRows>  \
  result name parameters;
#include "cuda/table/stages.def"

// The functions of one row for one element type, by their names: EntriesOf<Stage::kSm80Backward>::backward, say.
template <Stage kStage>
struct EntriesOf;

#define STAGE(architecture, array, stage, header, entries) \
  template <>                                              \
  struct EntriesOf<Stage::array> {                         \
    entries                                                \
  };
#define SM80_ENTRY(result, name, parameters) result(*name) parameters = nullptr;
#define SM90_ENTRY SM80_ENTRY
#define DECODE_ENTRY SM80_ENTRY
#include "cuda/table/stages.def"

// kTable: the rows of a stage. entries<T, i>(): those of row i.
template <Stage kStage>
struct RowsOf;

#define STAGE(architecture, array, stage, header, entries)     \
  template <>                                                  \
  struct RowsOf<Stage::array> {                                \
    static constexpr const auto& kTable = kernel_table::array; \
    template <class T, size_t kRow>                            \
    static constexpr EntriesOf<Stage::array> entries_of() {    \
      using namespace architecture;                            \
      constexpr const auto& row = kTable[kRow];                \
      return {entries};                                        \
    }                                                          \
  };
#define SM80_ENTRY(result, name, parameters) name<T, row.head_dims.qk, row.options>,
#define SM90_ENTRY(result, name, parameters) name<T, row.head_dims.qk, row.options, row.head_dims.v>,
#define DECODE_ENTRY(result, name, parameters) name<T, row.head_dim, row.kernel_rows()>,
#include "cuda/table/stages.def"

// A row of a stage, for one of its element types: one compiled kernel.
struct TableRow {
  Stage stage = Stage::kNone;
  int row = -1;
  unsigned type = 0;  // one of Types
  explicit operator bool() const { return stage != Stage::kNone; }
};

template <Stage kStage>
const auto& table_row(const TableRow& row) {
  return RowsOf<kStage>::kTable[row.row];
}

}  // namespace flashattn_ext
