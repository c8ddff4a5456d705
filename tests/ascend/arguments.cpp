// Calls with one wrong argument each, for every kind of check that the vendor's CPU debugging makes of the calls that
// the emulator has (asc-tools, cpudebug/src/api_check): positions, alignments, extents, ranges. The line that is marked
// "fault: NAME" must be named by the report of that case. Usage: arguments CASE MODE
#include <functional>
#include <map>

#include "harness.h"

using namespace AscendC;

constexpr uint32_t kElements = 1024;

// A vector core with two buffers of floats in UB, and GM.
struct Vector {
  GlobalTensor<float> gm;
  LocalTensor<float> a{TPosition::VECIN, 0, kElements}, b{TPosition::VECIN, kElements * 4, kElements};
  LocalTensor<float> l1{TPosition::A1, 0, kElements};  // which no vector core has

  __aicore__ explicit Vector(GM_ADDR x) {
    InitSocState();
    gm.SetGlobalBuffer((__gm__ float*)x);
  }
};

// A cube core with a tile of halfs in each memory, and GM.
struct Cube {
  static constexpr uint32_t kTile = 32 * 32;
  GlobalTensor<half> gm;
  GlobalTensor<float> out;
  LocalTensor<half> l1{TPosition::A1, 0, kTile}, l0a{TPosition::A2, 0, kTile}, l0b{TPosition::B2, 0, kTile};
  LocalTensor<float> l1f{TPosition::A1, 0, kTile / 2}, l0af{TPosition::A2, 0, kTile / 2},
      l0bf{TPosition::B2, 0, kTile / 2}, l0c{TPosition::CO1, 0, kTile};  // fp32 in the same places

  __aicore__ explicit Cube(GM_ADDR x) {
    InitSocState();
    gm.SetGlobalBuffer((__gm__ half*)x);
    out.SetGlobalBuffer((__gm__ float*)x);
  }
};

__aicore__ Nd2NzParams Rows(int rows, int columns) {
  Nd2NzParams p;
  p.ndNum = 1;
  p.nValue = rows;
  p.dValue = columns;
  p.srcDValue = columns;
  p.dstNzC0Stride = 32;
  p.dstNzNStride = 1;
  return p;
}
__aicore__ LoadData2DParams Fractals(int first, int count, int stride) {
  LoadData2DParams p;
  p.startIndex = first;
  p.repeatTimes = count;
  p.srcStride = stride;
  return p;
}
__aicore__ LoadData3DParamsV2<float> Image(int row, int rows, int column, int columns) {
  LoadData3DParamsV2<float> p;
  p.l1H = 1;
  p.l1W = 32;
  p.channelSize = 16;
  p.mStartPt = row;
  p.mExtension = rows;
  p.kStartPt = column;
  p.kExtension = columns;
  p.enTranspose = true;
  return p;
}
__aicore__ MmadParams Sizes(int m, int n, int k) {
  MmadParams p;
  p.m = m;
  p.n = n;
  p.k = k;
  return p;
}
__aicore__ FixpipeParamsV220 Drained(int m, int n, int rows, int pitch) {
  FixpipeParamsV220 p;
  p.mSize = m;
  p.nSize = n;
  p.srcStride = rows;
  p.dstStride = pitch;
  return p;
}

std::map<std::string, std::function<void(Vector&)>> vector_cases = {
    {"copy_source_misaligned", [](Vector& t) { DataCopy(t.gm, t.a[3], 64); }},  // fault: copy_source_misaligned
    {"copy_target_misaligned", [](Vector& t) { DataCopy(t.a[3], t.gm, 64); }},  // fault: copy_target_misaligned
    {"copy_beyond_tensor", [](Vector& t) { DataCopy(t.a[512], t.gm, 520); }},   // fault: copy_beyond_tensor
    {"copy_burst_of_zero",
     [](Vector& t) { DataCopy(t.a, t.gm, DataCopyParams(1, 0, 0, 0)); }},  // fault: copy_burst_of_zero
    {"left_padding_9",
     [](Vector& t) {
       const DataCopyPadExtParams<float> padding(true, 9, 0, 0.0f);
       DataCopyPad(t.a, t.gm, DataCopyExtParams(1, 32, 0, 0, 0), padding);  // fault: left_padding_9
     }},
    {"right_padding_9",
     [](Vector& t) {
       const DataCopyPadExtParams<float> padding(true, 0, 9, 0.0f);
       DataCopyPad(t.a, t.gm, DataCopyExtParams(1, 32, 0, 0, 0), padding);  // fault: right_padding_9
     }},
    {"padding_of_64_bits",
     [](Vector& t) {
       GlobalTensor<int64_t> wide;
       wide.SetGlobalBuffer((__gm__ int64_t*)t.gm.GetPhyAddr());
       const DataCopyPadExtParams<int64_t> padding(true, 0, 1, 7);
       const LocalTensor<int64_t> to = t.a.ReinterpretCast<int64_t>();
       DataCopyPad(to, wide, DataCopyExtParams(1, 24, 0, 0, 0), padding);  // fault: padding_of_64_bits
     }},
    {"binary_position", [](Vector& t) { Add(t.l1, t.a, t.b, 64); }},         // fault: binary_position
    {"binary_source_position", [](Vector& t) { Add(t.a, t.a, t.l1, 64); }},  // fault: binary_source_position
    {"binary_misaligned", [](Vector& t) { Add(t.a, t.b[1], t.b, 64); }},     // fault: binary_misaligned
    {"binary_count", [](Vector& t) { Add(t.a, t.b[960], t.b, 65); }},        // fault: binary_count
    {"binary_repeats",
     [](Vector& t) {
       Add(t.a, t.b, t.b, 64, 17, {1, 1, 1, 8, 8, 8});  // fault: binary_repeats
     }},
    {"binary_repeat_stride",
     [](Vector& t) {
       Add(t.a, t.a, t.b, 64, 2, {1, 1, 1, 8, 8, 121});  // fault: binary_repeat_stride
     }},
    {"scalar_position", [](Vector& t) { Muls(t.a, t.l1, 1.0f, 64); }},               // fault: scalar_position
    {"scalar_misaligned", [](Vector& t) { Muls(t.a[1], t.b, 1.0f, 64); }},           // fault: scalar_misaligned
    {"scalar_count", [](Vector& t) { Muls(t.a[1000], t.b, 1.0f, 25); }},             // fault: scalar_count
    {"unary_position", [](Vector& t) { Exp(t.l1, t.b, 64); }},                       // fault: unary_position
    {"unary_block_stride", [](Vector& t) { Exp(t.a, t.b, 64, 1, {1, 19, 8, 8}); }},  // fault: unary_block_stride
    {"cast_count",
     [](Vector& t) {
       Cast(t.a.ReinterpretCast<half>(), t.b[1000], RoundMode::CAST_RINT, 25);  // fault: cast_count
     }},
    {"fill_position", [](Vector& t) { Duplicate(t.l1, 0.0f, 64); }},            // fault: fill_position
    {"fill_misaligned", [](Vector& t) { Duplicate(t.a[4], 0.0f, 64); }},        // fault: fill_misaligned
    {"fill_repeats", [](Vector& t) { Duplicate(t.a, 0.0f, 64, 17, 1, 8); }},    // fault: fill_repeats
    {"broadcast_position", [](Vector& t) { Brcb(t.l1, t.a, 1, {1, 8}); }},      // fault: broadcast_position
    {"broadcast_misaligned", [](Vector& t) { Brcb(t.a, t.b[1], 1, {1, 8}); }},  // fault: broadcast_misaligned
    {"broadcast_source", [](Vector& t) { Brcb(t.a, t.b[1016], 2, {1, 8}); }},   // fault: broadcast_source
    {"broadcast_target", [](Vector& t) { Brcb(t.a[960], t.b, 2, {1, 8}); }},    // fault: broadcast_target
    {"whole_reduce_position",
     [](Vector& t) {
       WholeReduceSum(t.l1, t.a, 64, 1, 1, 1, 8);  // fault: whole_reduce_position
     }},
    {"whole_reduce_target",
     [](Vector& t) {
       WholeReduceMax(t.a[1022], t.b, 64, 3, 1, 1, 8, ReduceOrder::ORDER_ONLY_VALUE);  // fault: whole_reduce_target
     }},
    {"whole_reduce_pairs",
     [](Vector& t) {
       WholeReduceMax(t.a[1021], t.b, 64, 2, 1, 1, 8);  // fault: whole_reduce_pairs
     }},
    {"whole_reduce_source",
     [](Vector& t) {
       WholeReduceSum(t.a, t.b, 64, 17, 1, 1, 8);  // fault: whole_reduce_source
     }},
    {"block_reduce_target",
     [](Vector& t) { BlockReduceMax(t.a[1016], t.b, 2, 64, 1, 1, 8); }},  // fault: block_reduce_target
    {"block_reduce_misaligned",
     [](Vector& t) { BlockReduceSum(t.a[1], t.b, 1, 64, 1, 1, 8); }},           // fault: block_reduce_misaligned
    {"index_position", [](Vector& t) { CreateVecIndex(t.l1, 0.0f, 64); }},      // fault: index_position
    {"index_misaligned", [](Vector& t) { CreateVecIndex(t.a[1], 0.0f, 64); }},  // fault: index_misaligned
    {"index_count", [](Vector& t) { CreateVecIndex(t.a[1000], 0.0f, 25); }},    // fault: index_count
    {"mask_of_64_lanes",
     [](Vector& t) {
       uint64_t mask[2] = {1, 1};
       Exp(t.a, t.b, mask, 1, {1, 1, 8, 8});  // fault: mask_of_64_lanes
     }},
};

std::map<std::string, std::function<void(Cube&)>> cube_cases = {
    {"rows_position", [](Cube& t) { DataCopy(t.l0a, t.gm, Rows(32, 32)); }},      // fault: rows_position
    {"rows_misaligned", [](Cube& t) { DataCopy(t.l1[8], t.gm, Rows(16, 16)); }},  // fault: rows_misaligned
    {"rows_beyond_tensor", [](Cube& t) { DataCopy(t.l1, t.gm, Rows(32, 33)); }},  // fault: rows_beyond_tensor
    {"matrices_beyond_tensor",
     [](Cube& t) {
       Nd2NzParams p = Rows(16, 16);
       p.ndNum = 3;
       p.dstNzMatrixStride = 512;
       DataCopy(t.l1, t.gm, p);  // fault: matrices_beyond_tensor
     }},
    {"matrices_misaligned",
     [](Cube& t) {
       Nd2NzParams p = Rows(16, 16);
       p.ndNum = 2;
       p.dstNzMatrixStride = 8;
       DataCopy(t.l1, t.gm, p);  // fault: matrices_misaligned
     }},
    {"zeros_beyond_tensor", [](Cube& t) { Fill(t.l1, {2, 20, 26, half(0.0f)}); }},  // fault: zeros_beyond_tensor
    {"zeros_position",
     [](Cube& t) { Fill(t.l0c.ReinterpretCast<half>(), {1, 1, 0, half(0.0f)}); }},       // fault: zeros_position
    {"load_target_position", [](Cube& t) { LoadData(t.l1, t.l1, Fractals(0, 1, 1)); }},  // fault: load_target_position
    {"load_source_position",
     [](Cube& t) { LoadData(t.l0a, t.l0b, Fractals(0, 1, 1)); }},  // fault: load_source_position
    {"load_target_extent",
     [](Cube& t) { LoadData(t.l0a[768], t.l1, Fractals(0, 2, 1)); }},                     // fault: load_target_extent
    {"load_source_extent", [](Cube& t) { LoadData(t.l0a, t.l1, Fractals(2, 2, 2)); }},    // fault: load_source_extent
    {"load_misaligned", [](Cube& t) { LoadData(t.l0b[128], t.l1, Fractals(0, 1, 1)); }},  // fault: load_misaligned
    {"image_rows", [](Cube& t) { LoadData(t.l0af, t.l1f, Image(16, 32, 0, 16)); }},       // fault: image_rows
    {"image_columns", [](Cube& t) { LoadData(t.l0af, t.l1f, Image(0, 16, 8, 16)); }},     // fault: image_columns
    {"image_part_of_column",
     [](Cube& t) { LoadData(t.l0af, t.l1f, Image(0, 16, 0, 12)); }},  // fault: image_part_of_column
    {"image_target_extent",
     [](Cube& t) { LoadData(t.l0bf[384], t.l1f, Image(0, 16, 0, 16)); }},  // fault: image_target_extent
    {"image_source_extent",
     [](Cube& t) { LoadData(t.l0bf, t.l1f[128], Image(0, 32, 0, 16)); }},  // fault: image_source_extent
    {"product_in_hf32",
     [](Cube& t) {
       SetHF32Mode(true);
       Mmad(t.l0c, t.l0af, t.l0bf, Sizes(16, 16, 8));  // fault: product_in_hf32
     }},
    {"product_without_k_direction",  // 8 rows of 16, transposed: LoadData 3D pads k to 16, and Mmad has to know
     [](Cube& t) {
       SetHF32Mode(false);
       Fill(t.l1f, InitConstValueParams<float>(1, 64, 0, 0.0f));
       SetFlag<HardEvent::MTE2_MTE1>(0);
       WaitFlag<HardEvent::MTE2_MTE1>(0);
       LoadData3DParamsV2<float> image = Image(0, 16, 0, 32);
       image.l1W = 16;
       image.channelSize = 32;
       LoadData(t.l0af, t.l1f, image);
       LoadData(t.l0bf, t.l1f, image);
       SetFlag<HardEvent::MTE1_M>(0);
       WaitFlag<HardEvent::MTE1_M>(0);
       MmadParams p = Sizes(32, 16, 8);
       p.kDirectionAlign = true;
       Mmad(t.l0c, t.l0af, t.l0bf, p);
       PipeBarrier<PIPE_M>();
       p.kDirectionAlign = false;
       Mmad(t.l0c, t.l0af, t.l0bf, p);  // fault: product_without_k_direction
     }},
    {"product_in_any_mode",
     [](Cube& t) { Mmad(t.l0c, t.l0af, t.l0bf, Sizes(16, 16, 8)); }},  // fault: product_in_any_mode
    {"product_target_position",
     [](Cube& t) {
       Mmad(t.l0a.ReinterpretCast<float>(), t.l0a, t.l0b, Sizes(16, 16, 16));  // fault: product_target_position
     }},
    {"product_left_position",
     [](Cube& t) { Mmad(t.l0c, t.l0b, t.l0b, Sizes(16, 16, 16)); }},  // fault: product_left_position
    {"product_right_position",
     [](Cube& t) { Mmad(t.l0c, t.l0a, t.l0a, Sizes(16, 16, 16)); }},                 // fault: product_right_position
    {"product_m", [](Cube& t) { Mmad(t.l0c, t.l0a, t.l0b, Sizes(4096, 16, 16)); }},  // fault: product_m
    {"product_n", [](Cube& t) { Mmad(t.l0c, t.l0a, t.l0b, Sizes(16, 4096, 16)); }},  // fault: product_n
    {"product_k", [](Cube& t) { Mmad(t.l0c, t.l0a, t.l0b, Sizes(16, 16, 4096)); }},  // fault: product_k
    {"product_target_extent",
     [](Cube& t) { Mmad(t.l0c[256], t.l0a, t.l0b, Sizes(32, 32, 16)); }},  // fault: product_target_extent
    {"product_left_extent",
     [](Cube& t) { Mmad(t.l0c, t.l0a, t.l0b, Sizes(32, 16, 48)); }},  // fault: product_left_extent
    {"product_right_extent",
     [](Cube& t) { Mmad(t.l0c, t.l0a, t.l0b, Sizes(16, 32, 48)); }},  // fault: product_right_extent
    {"product_misaligned",
     [](Cube& t) { Mmad(t.l0c[16], t.l0a, t.l0b, Sizes(16, 16, 16)); }},  // fault: product_misaligned
    {"drain_position",
     [](Cube& t) {
       Fixpipe(t.out, t.l0a.ReinterpretCast<float>(), Drained(16, 16, 16, 16));  // fault: drain_position
     }},
    {"drain_extent", [](Cube& t) { Fixpipe(t.out, t.l0c, Drained(16, 48, 32, 48)); }},  // fault: drain_extent
    {"drain_rows", [](Cube& t) { Fixpipe(t.out, t.l0c, Drained(8193, 16, 16, 16)); }},  // fault: drain_rows
    {"drain_strips",
     [](Cube& t) {
       Fixpipe<float, float, CFG_NZ>(t.out, t.l0c, Drained(16, 32, 16, 31));  // fault: drain_strips
     }},
    {"drain_stride", [](Cube& t) { Fixpipe(t.out, t.l0c, Drained(16, 16, 20, 16)); }},  // fault: drain_stride
};

int main(int, char** argv) {
  std::vector<float> x(kElements);
  ascend_emulator::GlobalMemory gm;
  gm.add("x", x.data(), x.size() * sizeof(float), ascend_emulator::Use::accumulator);
  const auto kernel = [&] {
    if ASCEND_IS_AIC {
      Cube cube((GM_ADDR)x.data());
      cube_cases.at(argv[1])(cube);
    }
    if ASCEND_IS_AIV {
      Vector vector((GM_ADDR)x.data());
      if (vector_cases.count(argv[1])) vector_cases.at(argv[1])(vector);
    }
    PipeBarrier<PIPE_ALL>();
  };
  const auto type = cube_cases.count(argv[1]) ? KERNEL_TYPE_MIX_AIC_1_2 : KERNEL_TYPE_AIV_ONLY;
  print(ascend_emulator::launch(type, 1, parse_options(argv[2]), gm, kernel));
}
