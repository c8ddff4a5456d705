// One instruction per case, between a load and a store. Usage: api CASE MODE INPUT0 INPUT1 OUTPUT
// The output starts as -7 everywhere (bytes: 7); what the instruction writes over it is compared with numpy.
#include <functional>
#include <map>

#include "harness.h"

using namespace AscendC;

constexpr uint32_t kElements = 1024;

// Loads both inputs into UB, runs op(out, a, b), stores out.
template <typename Out, typename In>
__aicore__ void around(GM_ADDR in0, GM_ADDR in1, GM_ADDR output,
                       const std::function<void(LocalTensor<Out>, LocalTensor<In>, LocalTensor<In>)>& op) {
  InitSocState();
  set_ctrl(sbitset1(get_ctrl(), 48));  // infinities and NaN stay what they are
  GlobalTensor<In> g0, g1;
  GlobalTensor<Out> g_out;
  g0.SetGlobalBuffer((__gm__ In*)in0);
  g1.SetGlobalBuffer((__gm__ In*)in1);
  g_out.SetGlobalBuffer((__gm__ Out*)output);
  constexpr uint32_t kBytes = kElements * sizeof(In);
  LocalTensor<In> a(TPosition::VECIN, 0, kElements), b(TPosition::VECIN, kBytes, kElements);
  LocalTensor<Out> out(TPosition::VECIN, 2 * kBytes, kElements);
  DataCopy(a, g0, kElements);
  DataCopy(b, g1, kElements);
  SetFlag<HardEvent::MTE2_V>(0);
  WaitFlag<HardEvent::MTE2_V>(0);
  if constexpr (sizeof(Out) == 1)  // no Duplicate of bytes
    Duplicate(out.template ReinterpretCast<uint16_t>(), uint16_t(0x0707), int32_t(kElements / 2));
  else
    Duplicate(out, Out(int32_t(-7)), int32_t(kElements));
  PipeBarrier<PIPE_V>();
  op(out, a, b);
  SetFlag<HardEvent::V_MTE3>(0);
  WaitFlag<HardEvent::V_MTE3>(0);
  DataCopy(g_out, out, kElements);
  PipeBarrier<PIPE_ALL>();
}

// What CreateVecIndex makes of 1000 elements, with the TPipe that it takes its event ids from.
__aicore__ void Index(GM_ADDR output) {
  TPipe pipe;
  TBuf<TPosition::VECOUT> buffer;
  pipe.InitBuffer(buffer, kElements * 4);
  GlobalTensor<int32_t> to;
  to.SetGlobalBuffer((__gm__ int32_t*)output);
  const LocalTensor<int32_t> out = buffer.Get<int32_t>();
  Duplicate(out, int32_t(-7), int32_t(kElements));
  const TEventID counted = pipe.AllocEventID<HardEvent::V_S>(), made = pipe.AllocEventID<HardEvent::V_MTE3>();
  SetFlag<HardEvent::V_S>(counted);  // its first block is written by the scalar unit
  WaitFlag<HardEvent::V_S>(counted);
  CreateVecIndex(out, int32_t(5), 1000);
  SetFlag<HardEvent::V_MTE3>(made);
  WaitFlag<HardEvent::V_MTE3>(made);
  DataCopy(to, out, kElements);
  pipe.ReleaseEventID<HardEvent::V_S>(counted);
  pipe.ReleaseEventID<HardEvent::V_MTE3>(made);
}

using Kernel = std::function<void(GM_ADDR, GM_ADDR, GM_ADDR)>;
std::map<std::string, Kernel> cases;

template <typename Out, typename In, typename F>
void add(const std::string& name, F op) {
  cases[name] = [op](GM_ADDR a, GM_ADDR b, GM_ADDR out) { around<Out, In>(a, b, out, op); };
}

// The count form with 1000 elements, the mask + repeat form with 40 lanes, two strides and a broadcast operand.
template <typename T>
void elementwise(const std::string& type) {
  using L = LocalTensor<T>;
#define BINARY(NAME)                                                                 \
  add<T, T>(#NAME "_count_" + type, [](L out, L a, L b) { NAME(out, a, b, 1000); }); \
  add<T, T>(#NAME "_mask_" + type,                                                   \
            [](L out, L a, L b) { NAME(out, a, b, 40, 3, BinaryRepeatParams(1, 1, 0, 16, 8, 1)); });
  BINARY(Add)
  BINARY(Sub)
  BINARY(Mul)
  BINARY(Div)
  BINARY(Max)
  BINARY(Min)
#undef BINARY
  add<T, T>("FusedMulAdd_mask_" + type,
            [](L out, L a, L b) { FusedMulAdd(out, a, b, 40, 3, BinaryRepeatParams(1, 0, 1, 16, 1, 8)); });
  if constexpr (std::is_same_v<T, float>)
    add<T, T>("Axpy_mask_" + type, [](L out, L a, L) { Axpy(out, a, 0.75f, 40, 3, UnaryRepeatParams(1, 2, 16, 8)); });
  for (uint8_t pattern : {1, 2})
    add<T, T>("GatherMask_" + std::to_string(pattern) + "_" + type, [pattern](L out, L a, L) {
      GatherMaskParams gather;
      gather.repeatTimes = 3;
      gather.src0RepeatStride = 16;
      uint64_t count = 0;
      GatherMask(out, a, pattern, false, 0, gather, count);
    });
#define SCALAR(NAME)                                                                      \
  add<T, T>(#NAME "_count_" + type, [](L out, L a, L) { NAME(out, a, T(0.75f), 1000); }); \
  add<T, T>(#NAME "_mask_" + type,                                                        \
            [](L out, L a, L) { NAME(out, a, T(0.75f), 40, 3, UnaryRepeatParams(1, 2, 16, 8)); });
  SCALAR(Adds)
  SCALAR(Muls)
  SCALAR(Maxs)
  SCALAR(Mins)
#undef SCALAR
#define UNARY(NAME)                                                             \
  add<T, T>(#NAME "_count_" + type, [](L out, L a, L) { NAME(out, a, 1000); }); \
  add<T, T>(#NAME "_mask_" + type, [](L out, L a, L) { NAME(out, a, 40, 3, UnaryRepeatParams(1, 2, 16, 8)); });
  UNARY(Exp)
  UNARY(Ln)
  UNARY(Abs)
#undef UNARY
  add<T, T>("Duplicate_count_" + type, [](L out, L, L) { Duplicate(out, T(2.5f), 77); });
  add<T, T>("Duplicate_mask_" + type, [](L out, L, L) {
    uint64_t mask[2] = {0xf0f0f0f0f0f0f0f0, 0};
    Duplicate(out, T(2.5f), mask, 3, 1, 16);
  });
  add<T, T>("Brcb_" + type, [](L out, L a, L) { Brcb(out, a, 3, BrcbRepeatParams(1, 10)); });
  add<T, T>("WholeReduceMax_" + type,
            [](L out, L a, L) { WholeReduceMax(out, a, 40, 5, 3, 1, 8, ReduceOrder::ORDER_ONLY_VALUE); });
  add<T, T>("WholeReduceSum_" + type, [](L out, L a, L) { WholeReduceSum(out, a, 40, 5, 3, 1, 8); });
  add<T, T>("BlockReduceMax_" + type, [](L out, L a, L) { BlockReduceMax(out, a, 5, 40, 2, 1, 8); });
  add<T, T>("BlockReduceSum_" + type, [](L out, L a, L) { BlockReduceSum(out, a, 5, 40, 2, 1, 8); });
  add<T, T>("WholeReduceMax_index_" + type, [](L out, L a, L) { WholeReduceMax(out, a, 40, 5, 1, 1, 8); });
}

template <typename Narrow>
void casts(const std::string& type) {
  add<float, Narrow>("Cast_widen_" + type, [](LocalTensor<float> out, LocalTensor<Narrow> a, LocalTensor<Narrow>) {
    Cast(out, a, RoundMode::CAST_NONE, 1000);
  });
  const std::map<std::string, RoundMode> modes = {{"RINT", RoundMode::CAST_RINT},
                                                  {"FLOOR", RoundMode::CAST_FLOOR},
                                                  {"CEIL", RoundMode::CAST_CEIL},
                                                  {"ROUND", RoundMode::CAST_ROUND},
                                                  {"TRUNC", RoundMode::CAST_TRUNC}};
  for (const auto& [name, mode] : modes)
    add<Narrow, float>("Cast_" + name + "_" + type, [mode = mode](LocalTensor<Narrow> out, LocalTensor<float> a,
                                                                  LocalTensor<float>) { Cast(out, a, mode, 1000); });
  add<Narrow, float>("Cast_mask_" + type, [](LocalTensor<Narrow> out, LocalTensor<float> a, LocalTensor<float>) {
    Cast(out, a, RoundMode::CAST_RINT, 40, 3, UnaryRepeatParams(1, 1, 8, 16));
  });
}

// What integers have: modulo 2^n, logical and arithmetic shifts, bits of 16-bit words.
void integers() {
  using L32 = LocalTensor<int32_t>;
  using L16 = LocalTensor<int16_t>;
  const auto wrap = [] { SetSaturationFlag<SaturationMode::INT>(false); };
  add<int32_t, int32_t>("int32_Add", [=](L32 out, L32 a, L32 b) { wrap(), Add(out, a, b, 1000); });
  add<int32_t, int32_t>("int32_Sub", [=](L32 out, L32 a, L32 b) { wrap(), Sub(out, a, b, 1000); });
  add<int32_t, int32_t>("int32_Adds", [=](L32 out, L32 a, L32) { wrap(), Adds(out, a, int32_t(0x70000001), 1000); });
  add<int32_t, int32_t>("int32_Muls", [=](L32 out, L32 a, L32) { wrap(), Muls(out, a, int32_t(0xD2511F53), 1000); });
  add<int32_t, int32_t>("int32_ShiftLeft", [](L32 out, L32 a, L32) { ShiftLeft(out, a, int32_t(7), 1000); });
  add<int32_t, int32_t>("int32_ShiftRight", [](L32 out, L32 a, L32) { ShiftRight(out, a, int32_t(31), 1000); });
  add<uint32_t, uint32_t>("uint32_ShiftRight", [](LocalTensor<uint32_t> out, LocalTensor<uint32_t> a,
                                                  LocalTensor<uint32_t>) { ShiftRight(out, a, uint32_t(24), 1000); });
  add<int16_t, int16_t>("int16_And", [](L16 out, L16 a, L16 b) { And(out, a, b, 1000); });
  add<int16_t, int16_t>("int16_Or", [](L16 out, L16 a, L16 b) { Or(out, a, b, 1000); });
  cases["int32_CreateVecIndex"] = [](GM_ADDR, GM_ADDR, GM_ADDR out) { Index(out); };
  add<float, int32_t>("int32_to_float",
                      [](LocalTensor<float> out, L32 a, L32) { Cast(out, a, RoundMode::CAST_NONE, 1000); });
  add<int32_t, float>("float_to_int32", [](L32 out, LocalTensor<float> a, LocalTensor<float>) {
    Cast(out, a, RoundMode::CAST_RINT, 1000);
  });
  const std::map<std::string, RoundMode> modes = {{"RINT", RoundMode::CAST_RINT}, {"TRUNC", RoundMode::CAST_TRUNC}};
  for (const auto& [name, mode] : modes)
    add<uint8_t, half>("half_to_uint8_" + name, [mode = mode](LocalTensor<uint8_t> out, LocalTensor<half> a,
                                                              LocalTensor<half>) { Cast(out, a, mode, 1000); });
}

// Copies with strides; the vector unit is not involved. UB is laid out by the load and read back whole.
void copies() {
  using L = LocalTensor<float>;
  cases["DataCopy_rows"] = [](GM_ADDR in, GM_ADDR, GM_ADDR output) {  // 5 rows of 2 blocks, 3 apart in GM, 1 in UB
    around<float, float>(in, in, output, [&](L out, L, L) {
      GlobalTensor<float> g;
      g.SetGlobalBuffer((__gm__ float*)in, kElements);
      SetFlag<HardEvent::V_MTE2>(0);
      WaitFlag<HardEvent::V_MTE2>(0);
      DataCopy(out, g, DataCopyParams(5, 2, 3, 1));
      SetFlag<HardEvent::MTE2_MTE3>(0);
      WaitFlag<HardEvent::MTE2_MTE3>(0);
    });
  };
  cases["DataCopyPad_load"] = [](GM_ADDR in, GM_ADDR,
                                 GM_ADDR output) {  // 4 rows of 13 floats, pitch 20 in GM, 4 blocks in UB
    around<float, float>(in, in, output, [&](L out, L, L) {
      GlobalTensor<float> g;
      g.SetGlobalBuffer((__gm__ float*)in, kElements);
      SetFlag<HardEvent::V_MTE2>(0);
      WaitFlag<HardEvent::V_MTE2>(0);
      DataCopyPad(out, g[3], DataCopyExtParams(4, 13 * 4, 7 * 4, 2, 0), DataCopyPadExtParams<float>(true, 1, 2, 5.5f));
      SetFlag<HardEvent::MTE2_MTE3>(0);
      WaitFlag<HardEvent::MTE2_MTE3>(0);
    });
  };
  cases["DataCopyPad_store"] = [](GM_ADDR in, GM_ADDR,
                                  GM_ADDR output) {  // 4 rows of 13 floats, 3 blocks apart in UB, 20 in GM
    around<float, float>(in, in, output, [&](L out, L a, L) {
      GlobalTensor<float> g;
      g.SetGlobalBuffer((__gm__ float*)output, kElements);
      SetFlag<HardEvent::V_MTE3>(1);
      WaitFlag<HardEvent::V_MTE3>(1);
      DataCopy(g, out, kElements);
      PipeBarrier<PIPE_MTE3>();
      DataCopyPad(g[3], a, DataCopyExtParams(4, 13 * 4, 1, 7 * 4, 0));
      SetFlag<HardEvent::MTE3_MTE2>(0);
      WaitFlag<HardEvent::MTE3_MTE2>(0);
      DataCopy(out, g, kElements);
      SetFlag<HardEvent::MTE2_MTE3>(0);
      WaitFlag<HardEvent::MTE2_MTE3>(0);
    });
  };
  cases["atomic"] = [](GM_ADDR in, GM_ADDR, GM_ADDR output) {  // -7 everywhere, then the input on top of 256 of them
    around<float, float>(in, in, output, [&](L out, L a, L) {
      GlobalTensor<float> g;
      g.SetGlobalBuffer((__gm__ float*)output, kElements);
      SetFlag<HardEvent::V_MTE3>(1);
      WaitFlag<HardEvent::V_MTE3>(1);
      DataCopy(g, out, kElements);
      PipeBarrier<PIPE_MTE3>();
      SetAtomicAdd<float>();
      DataCopy(g, a, 256);
      SetAtomicNone();
      SetFlag<HardEvent::MTE3_MTE2>(0);
      WaitFlag<HardEvent::MTE3_MTE2>(0);
      DataCopy(out, g, kElements);
      SetFlag<HardEvent::MTE2_MTE3>(0);
      WaitFlag<HardEvent::MTE2_MTE3>(0);
    });
  };
  cases["scalar"] = [](GM_ADDR in, GM_ADDR, GM_ADDR output) {  // out[3] = a[5] + in[6] through the scalar unit
    around<float, float>(in, in, output, [&](L out, L a, L) {
      GlobalTensor<float> g;
      g.SetGlobalBuffer((__gm__ float*)in, kElements);
      SetFlag<HardEvent::V_S>(0);
      WaitFlag<HardEvent::V_S>(0);
      out.SetValue(3, a.GetValue(5) + g.GetValue(6));
      SetFlag<HardEvent::S_MTE3>(0);
      WaitFlag<HardEvent::S_MTE3>(0);
    });
  };
}

int main(int, char** argv) {
  elementwise<float>("float32");
  elementwise<half>("float16");
  casts<half>("float16");
  casts<bfloat16_t>("bfloat16");
  integers();
  copies();
  std::vector<uint8_t> a = read_file(argv[3]), b = read_file(argv[4]), out(kElements * 4);
  ascend_emulator::GlobalMemory gm;
  gm.add("a", a.data(), a.size(), ascend_emulator::Use::input);
  gm.add("b", b.data(), b.size(), ascend_emulator::Use::input);
  gm.add("out", out.data(), out.size(), ascend_emulator::Use::output);
  const Kernel& kernel = cases.at(argv[1]);
  print(ascend_emulator::launch(KERNEL_TYPE_AIV_ONLY, 1, parse_options(argv[2]), gm,
                                [&] { kernel(a.data(), b.data(), out.data()); }));
  write_file(argv[5], out);
}
