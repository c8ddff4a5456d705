// One call of a whole mixed kernel in fp16 (forward) or fp32 (backward), of two tiles of queries and three of keys.
// test_ascend_emulator.py compiles it with a copy of the kernels in which faults can be planted; WHOLE_BACKWARD
// chooses. Usage: whole MODE SEED FAULT
#include <cmath>

#include "ascend_c/dispatch.h"
#include "harness.h"
#if defined(WHOLE_BACKWARD)
#include "ascend_c/backward.h"
#else
#include "ascend_c/forward.h"
#endif

using namespace flashattn_ext;
using ascend_emulator::Use;

#if defined(WHOLE_BACKWARD)
using Element = float;
constexpr DType kType = DType::kFloat32;
#else
using Element = half;
constexpr DType kType = DType::kFloat16;
#endif
constexpr int64_t kQueries = 130, kKeys = 300, kDim = 256, kCores = 1;

struct Tensor {
  std::vector<Element> values;
  explicit Tensor(int64_t rows) : values(size_t(rows * kDim)) {
    for (size_t i = 0; i < values.size(); ++i) values[i] = Element(std::sin(float(i)));
  }
  TensorView view() { return {values.data(), 0, kDim, kDim}; }
  void add(ascend_emulator::GlobalMemory& gm, const char* name, Use use) {
    gm.add(name, values.data(), values.size() * sizeof(Element), use);
  }
};

int main(int, char** argv) {
  planted_fault = argv[3];
  Tensor q(kQueries), k(kKeys), v(kKeys), out(kQueries), dout(kQueries);
  std::vector<float> lse(kQueries);
  AttnGradParams p;
  p.dtype = kType;
  p.batch = p.heads_q = p.heads_k = 1;
  p.seqlen_q = kQueries;
  p.seqlen_k = kKeys;
  p.head_dim = p.head_dim_v = kDim;
  p.q = q.view();
  p.k = k.view();
  p.v = v.view();
  p.out = out.view();
  p.dout = dout.view();
  p.lse = {lse.data(), kQueries, kQueries};
  ascend_emulator::GlobalMemory gm;
  q.add(gm, "q", Use::input);
  k.add(gm, "k", Use::input);
  v.add(gm, "v", Use::input);
#if defined(WHOLE_BACKWARD)
  std::vector<uint8_t> workspace(ascend::backward_workspace_bytes(p, kCores));
  p.workspace = workspace.data();
  const ascend::Arguments arguments = ascend::backward_arguments(p, kCores);
  dout.add(gm, "dout", Use::input);
  gm.add("lse", lse.data(), lse.size() * 4, Use::input);
  gm.add("workspace", workspace.data(), workspace.size(), Use::accumulator, 4);
  const auto kernel = [&] { ascend::Backward<Element>(arguments); };
#else
  std::vector<uint8_t> workspace(ascend::forward_workspace_bytes(p, kCores));
  p.workspace = workspace.data();
  const ascend::Arguments arguments = ascend::forward_arguments(p, kCores);
  out.add(gm, "out", Use::output);
  gm.add("lse", lse.data(), lse.size() * 4, Use::output);
  const size_t before = size_t(static_cast<uint8_t*>(arguments.workspace) - workspace.data());  // alignment
  gm.add("workspace", arguments.workspace, workspace.size() - before, Use::workspace);
  const auto kernel = [&] { ascend::Forward<Element>(arguments); };
#endif
  print(ascend_emulator::launch(AscendC::KERNEL_TYPE_MIX_AIC_1_2, kCores, parse_options(argv[1], argv[2]), gm, kernel));
}
