// A mixed kernel, out = (2 * A B^T) V: the cube multiplies, the vector cores double and round, the cube multiplies
// again. Every faulty variant leaves out or changes one line, which is marked "fault: NAME" and must be named by the
// report. Usage: mixed CASE MODE SEED BLOCKS M N K D FILE_A FILE_B FILE_V FILE_OUT
#include "harness.h"

using namespace AscendC;

std::string fault;  // the planted one, or "none"
bool has(const char* name) { return fault == name; }

constexpr int kTile = 128;
enum CrossFlag { kScoresReady = 0, kProbabilitiesReady = 1 };

struct Sizes {
  int m, n, k, d;
};

__aicore__ inline int Round16(int x) { return (x + 15) / 16 * 16; }

// Each AIC computes the whole product for its own copy of the output.
class Cube {
 public:
  __aicore__ Cube(GM_ADDR a, GM_ADDR b, GM_ADDR v, GM_ADDR out, GM_ADDR scores, GM_ADDR probabilities, Sizes sizes)
      : s(sizes) {
    ga.SetGlobalBuffer((__gm__ half*)a);
    gb.SetGlobalBuffer((__gm__ half*)b);
    gv.SetGlobalBuffer((__gm__ half*)v);
    g_out.SetGlobalBuffer((__gm__ half*)out + GetBlockIdx() * s.m * Round16(s.d));
    g_scores.SetGlobalBuffer((__gm__ float*)scores + GetBlockIdx() * kTile * kTile);
    g_p.SetGlobalBuffer((__gm__ half*)probabilities + GetBlockIdx() * kTile * kTile);
    InitSocState();
    const int l1_elements = has("l1_too_big") ? 262144 : 2 * kTile * kTile;
    l1a = LocalTensor<half>(TPosition::A1, 0, l1_elements);  // fault: l1_too_big
    l1b = l1a[kTile * kTile];
    l0a = LocalTensor<half>(TPosition::A2, 0, kTile * kTile);
    l0b = LocalTensor<half>(TPosition::B2, 0, kTile * kTile);
    l0c = LocalTensor<float>(TPosition::CO1, 0, kTile * kTile);
  }

  __aicore__ void Run() {
    Load(l1a, ga, s.m, s.k, s.k);
    Load(l1b, gb, s.n, s.k, s.k);
    if (has("v_on_cube")) Adds(l1a, l1a, half(1.0f), 16);  // fault: v_on_cube
    SetFlag<HardEvent::MTE2_MTE1>(0);
    if (!has("no_load_flag")) WaitFlag<HardEvent::MTE2_MTE1>(0);
    LoadA(s.m, s.k);
    LoadB(s.n, s.k);
    Multiply(s.m, s.n, s.k);
    Drain(g_scores, kTile, s.n, NoQuant);
    if (!has("scores_never_announced")) CrossCoreSetFlag<2, PIPE_FIX>(kScoresReady);
    if (has("counter_overflow"))
      for (int i = 0; i < 16; ++i) CrossCoreSetFlag<2, PIPE_FIX>(5);  // fault: counter_overflow
    if (has("cross_id_16")) CrossCoreSetFlag<2, PIPE_FIX>(16);        // fault: cross_id_16

    if (!has("no_cross_wait")) CrossCoreWaitFlag(kProbabilitiesReady);  // fault: one_half_is_silent
    SetFlag<HardEvent::MTE1_MTE2>(0);
    WaitFlag<HardEvent::MTE1_MTE2>(0);
    Load(l1a, g_p, s.m, s.n, kTile);
    Load(l1b, gv, s.n, s.d, s.d);
    SetFlag<HardEvent::MTE2_MTE1>(0);
    WaitFlag<HardEvent::MTE2_MTE1>(0);
    SetFlag<HardEvent::M_MTE1>(0);
    WaitFlag<HardEvent::M_MTE1>(0);
    LoadA(s.m, s.n);
    LoadTransposed(s.n, s.d);
    SetFlag<HardEvent::FIX_M>(0);
    WaitFlag<HardEvent::FIX_M>(0);
    Multiply(s.m, s.d, s.n);
    Drain(g_out, Round16(s.d), s.d, has("no_quant_to_half") ? NoQuant : F322F16);
    if (has("cross_flag_leaks")) CrossCoreSetFlag<2, PIPE_FIX>(3);  // fault: cross_flag_leaks
    if (has("no_cross_wait")) CrossCoreWaitFlag(kProbabilitiesReady);
    if (has("no_load_flag")) WaitFlag<HardEvent::MTE2_MTE1>(0);
    PipeBarrier<PIPE_ALL>();
  }

 private:
  __aicore__ void Load(LocalTensor<half> l1, GlobalTensor<half> from, int rows, int columns, int pitch) {
    Nd2NzParams p;
    p.ndNum = 1;
    p.nValue = rows;
    p.dValue = columns;
    p.srcDValue = has("nd2nz_pitch") ? 65536 : pitch;
    p.dstNzC0Stride = Round16(rows);
    p.dstNzNStride = 1;
    DataCopy(l1, from, p);  // fault: nd2nz_pitch no_cross_wait set_on_wrong_pipe
    if (rows == Round16(rows) || has("nan_beyond_the_rows")) return;
    InitConstValueParams<half> zeros;  // products read whole fractals
    zeros.repeatTimes = Round16(columns) / 16;
    zeros.blockNum = Round16(rows) - rows;
    zeros.dstGap = rows;
    Fill(l1[rows * 16], zeros);
  }
  // NZ to ZZ, 16 rows at a time.
  __aicore__ void LoadA(int rows, int columns) {
    for (int r = 0; r < Round16(rows) / 16; ++r) {
      LoadData2DParams p;
      p.startIndex = r;
      p.repeatTimes = Round16(columns) / 16;
      p.srcStride = Round16(rows) / 16;
      const int misplaced = has("l0_misaligned") ? 16 : 0;
      LoadData(l0a[r * 16 * Round16(columns) + misplaced], l1a, p);  // fault: no_load_flag l0_misaligned
    }
  }
  __aicore__ void LoadB(int rows, int columns) {  // the NZ of X is the ZN of its transpose
    LoadData2DParams p;
    p.repeatTimes = has("repeat_of_zero") ? 0 : Round16(columns) / 16 * (Round16(rows) / 16);
    p.srcStride = 1;
    LoadData(has("wrong_memory") ? l1a : l0b, l1b, p);  // fault: wrong_memory repeat_of_zero
  }
  __aicore__ void LoadTransposed(int rows, int columns) {
    for (int r = 0; r < Round16(rows) / 16; ++r) {
      LoadData2DParams p;
      p.startIndex = r;
      p.repeatTimes = Round16(columns) / 16;
      p.srcStride = Round16(rows) / 16;
      p.ifTranspose = true;
      LoadData(l0b[r * 16 * Round16(columns)], l1b, p);
    }
  }
  __aicore__ void Multiply(int m, int n, int k) {
    SetFlag<HardEvent::MTE1_M>(0);
    WaitFlag<HardEvent::MTE1_M>(0);
    MmadParams p;
    p.m = has("gemv") ? 1 : m;
    p.n = Round16(n);
    p.k = has("reads_beyond_k") ? Round16(k) + 1 : k;
    Mmad(l0c, l0a, l0b, p);  // fault: gemv reads_beyond_k nan_beyond_the_rows
    if (has("accumulates_too_early")) {
      p.cmatrixInitVal = false;
      Mmad(l0c, l0a, l0b, p);  // fault: accumulates_too_early
    }
  }
  template <typename T>
  __aicore__ void Drain(GlobalTensor<T> to, int pitch, int columns, QuantMode_t quant) {
    SetFlag<HardEvent::M_FIX>(0);
    if (!has("no_drain_flag")) WaitFlag<HardEvent::M_FIX>(0);
    FixpipeParamsV220 p;
    p.nSize = has("columns_not_whole") ? columns : Round16(columns);
    p.mSize = s.m;
    p.srcStride = Round16(s.m);
    p.dstStride = pitch;
    p.quantPre = quant;
    if (has("rows_overlap")) p.dstStride = 16;
    if (has("out_of_bounds") && pitch == Round16(s.d)) to = to[16];
    if (has("out_in_fractals") && quant != NoQuant) {  // strips of 16 columns
      p.dstStride = s.m;
      return Fixpipe<T, float, CFG_NZ>(to, l0c, p);
    }
    Fixpipe(to, l0c, p);  // fault: no_drain_flag no_quant_to_half out_of_bounds columns_not_whole rows_overlap
    if (has("no_drain_flag")) WaitFlag<HardEvent::M_FIX>(0);
  }

  Sizes s;
  GlobalTensor<half> ga, gb, gv, g_out, g_p;
  GlobalTensor<float> g_scores;
  LocalTensor<half> l1a, l1b, l0a, l0b;
  LocalTensor<float> l0c;
};

// Each of the two vector cores takes half of the rows.
__aicore__ void Vector(GM_ADDR scores, GM_ADDR probabilities, Sizes s) {
  InitSocState();
  constexpr int kHalf = kTile / 2 * kTile;
  LocalTensor<float> x(TPosition::VECIN, 0, kHalf);
  LocalTensor<half> y(TPosition::VECOUT, kHalf * 4, kHalf);
  const int block = GetBlockIdx() / GetTaskRation(), half_rows = (s.m + 1) / 2;
  const int row = GetSubBlockIdx() * half_rows, rows = GetSubBlockIdx() ? s.m - half_rows : half_rows;
  GlobalTensor<float> from;
  GlobalTensor<half> to;
  from.SetGlobalBuffer((__gm__ float*)scores + (block * kTile + row) * kTile);
  to.SetGlobalBuffer((__gm__ half*)probabilities + (block * kTile + row) * kTile);

  if (has("cube_on_vector")) SetFlag<HardEvent::M_FIX>(0);              // fault: cube_on_vector
  if (!has("reads_scores_too_early")) CrossCoreWaitFlag(kScoresReady);  // fault: scores_never_announced
  const DataCopyExtParams copy(rows, s.n * 4, (kTile - s.n) * 4, (kTile - s.n) / 8, 0);
  const DataCopyPadExtParams<float> padding(true, 0, (8 - s.n % 8) % 8, 0.0f);
  DataCopyPad(x, from, copy, padding);  // fault: reads_scores_too_early
  SetFlag<HardEvent::MTE2_V>(0);
  WaitFlag<HardEvent::MTE2_V>(0);
  for (int r = 0; r < rows; ++r) {
    Muls(x[r * kTile], x[r * kTile], 2.0f, s.n);
    PipeBarrier<PIPE_V>();
    Cast(y[r * kTile], x[r * kTile], RoundMode::CAST_RINT, s.n);
  }
  SetFlag<HardEvent::V_MTE3>(0);
  WaitFlag<HardEvent::V_MTE3>(0);
  DataCopyPad(to, y, DataCopyExtParams(rows, s.n * 2, (kTile - s.n) / 16, (kTile - s.n) * 2, 0));
  if (has("set_on_wrong_pipe")) {
    CrossCoreSetFlag<2, PIPE_V>(kProbabilitiesReady);
  } else if (!has("one_half_is_silent") || GetSubBlockIdx() == 0) {
    CrossCoreSetFlag<2, PIPE_MTE3>(kProbabilitiesReady);
  }
  if (has("reads_scores_too_early")) CrossCoreWaitFlag(kScoresReady);
  if (has("sync_all_in_part") && GetSubBlockIdx() == 0) SyncAll();  // fault: sync_all_in_part
  PipeBarrier<PIPE_ALL>();
}

int main(int, char** argv) {
  fault = argv[1];
  const int blocks = std::stoi(argv[4]);
  const Sizes s{std::stoi(argv[5]), std::stoi(argv[6]), std::stoi(argv[7]), std::stoi(argv[8])};
  std::vector<uint8_t> a = read_file(argv[9]), b = read_file(argv[10]), v = read_file(argv[11]);
  std::vector<uint8_t> out(size_t(blocks * s.m * Round16(s.d)) * 2), scores(size_t(blocks) * kTile * kTile * 4);
  std::vector<uint8_t> probabilities(size_t(blocks) * kTile * kTile * 2);
  using ascend_emulator::Use;
  ascend_emulator::GlobalMemory gm;
  gm.add("a", a.data(), a.size(), Use::input);
  gm.add("b", b.data(), b.size(), Use::input);
  gm.add("v", v.data(), v.size(), Use::input);
  gm.add("out", out.data(), out.size(), Use::output);
  gm.add("scores", scores.data(), scores.size(), Use::workspace);
  gm.add("probabilities", probabilities.data(), probabilities.size(), Use::workspace);
  const auto kernel = [&] {
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_MIX_AIC_1_2);
    if ASCEND_IS_AIC {
      Cube cube(a.data(), b.data(), v.data(), out.data(), scores.data(), probabilities.data(), s);
      cube.Run();
    }
    if ASCEND_IS_AIV {
      Vector(scores.data(), probabilities.data(), s);
    }
  };
  print(ascend_emulator::launch(KERNEL_TYPE_MIX_AIC_1_2, blocks, parse_options(argv[2], argv[3]), gm, kernel));
  write_file(argv[12], out);
}
