// An NPU of host memory, with what torch_npu and CANN bring otherwise, so that tests can run the binding of
// ascend_c/npu: the emulator executes its kernels. Functions of torch_npu are declared by torch_npu's own headers; here
// they do the least that a test can see. Launches and fills wait in a queue, as torch_npu's do, until somebody looks at
// the memory.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_scaled_dot_product_attention_math.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/view_native.h>
#include <ATen/ops/zeros.h>
#include <acl/acl.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>
#include <torch_npu/csrc/aten/NPUGeneratorImpl.h>
#include <torch_npu/csrc/core/npu/NPUFormat.h>
#include <torch_npu/csrc/core/npu/NPUStream.h>
#include <torch_npu/csrc/framework/OpCommand.h>

#include <chrono>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <map>
#include <thread>
#include <utility>

#include "../../ascend_c/kernels.h"

namespace {

constexpr c10::DeviceType kNpu = c10::DeviceType::PrivateUse1;
constexpr int kCores = 2;
const c10::Device kDevice(kNpu, 0);

// --- memory and the queue
// ----------------------------------------------------------------------------------------------

struct Launch {
  std::string name;
  std::function<int()> run;
};

struct State {
  std::map<uint8_t*, size_t> memory;
  std::vector<uint8_t*> freed;  // by the host; the queue may still use it
  std::vector<Launch> queue, graph;
  bool capturing = false;
  int64_t format = ACL_FORMAT_ND;  // of every tensor
  std::string log, error;
  aclError last_error = ACL_SUCCESS;
};
State state;

void drain() {
  std::vector<Launch> queue;
  queue.swap(state.queue);
  for (const Launch& launch : queue) {
    state.log += launch.name + " ";
    const int error = launch.run();
    TORCH_CHECK(error == 0, launch.name, ": error ", error, " ", state.error);
  }
  for (uint8_t* block : state.freed) {
    state.memory.erase(block);
    std::free(block);
  }
  state.freed.clear();
}

struct HostAllocator : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    const size_t size = (bytes + 64) / 64 * 64;
    auto* const block = static_cast<uint8_t*>(std::aligned_alloc(64, size));
    std::memset(block, 0xff, size);  // NaN
    state.memory[block] = bytes;
    return {block, block, &release, kDevice};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
  static void release(void* block) {  // what a graph uses stays its own
    if (!state.capturing) state.freed.push_back(static_cast<uint8_t*>(block));
  }
};
HostAllocator allocator;
REGISTER_ALLOCATOR(kNpu, &allocator)

// --- the device for torch
// ----------------------------------------------------------------------------------------------

struct Guard : c10::impl::NoOpDeviceGuardImpl<kNpu> {
  c10::Device exchangeDevice(c10::Device) const override { return kDevice; }
  c10::Device getDevice() const override { return kDevice; }
  c10::Stream getStream(c10::Device) const noexcept override { return c10::Stream(c10::Stream::DEFAULT, kDevice); }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return getStream(kDevice); }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

struct Hooks : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override {
    return at_npu::detail::getDefaultNPUGenerator(index);
  }
};

at::Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(size, &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   dtype.value_or(at::kFloat), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           dtype.value_or(at::kFloat));
}

at::Tensor on_host(const at::Tensor& t) {
  if (t.is_cpu()) return t;
  return at::from_blob(t.data_ptr(), t.sizes(), t.strides(), t.options().device(at::kCPU));
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool) {
  drain();
  on_host(to).copy_(on_host(from));
  return to;
}
// An operator that resizes its result, such as arange, gets new memory.
at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  if (to.sizes() != from.sizes()) {
    to.unsafeGetTensorImpl()->set_storage_keep_dtype(empty(from.sizes(), from.scalar_type(), {}, {}, {}, {}).storage());
    to.unsafeGetTensorImpl()->set_sizes_contiguous(from.sizes());
  }
  return copy_from(from, to, false);
}

// A kernel has a name; torch's own operators have none and are not logged.
void enqueue(const std::string& name, std::function<int()> run) {
  (state.capturing ? state.graph : state.queue).push_back({name, std::move(run)});
}

at::Tensor& fill(at::Tensor& t, const at::Scalar& value) {
  enqueue("", [=] {
    on_host(t).fill_(value);
    return 0;
  });
  return t;
}
at::Tensor& zero(at::Tensor& t) { return fill(t, 0); }

// Values of the generator, or in a captured graph of what its memory holds at each replay.
at::Tensor& random(at::Tensor& t, int64_t from, std::optional<int64_t> to, std::optional<at::Generator>) {
  const at::Generator& npu = at_npu::detail::getDefaultNPUGenerator(0);
  const at_npu::PhiloxNpuState drawn = at::check_generator<at_npu::NPUGeneratorImpl>(npu)->philox_npu_state(4);
  enqueue("", [=] {
    const auto value = [](const at::Tensor* memory) { return *memory->const_data_ptr<int64_t>(); };
    const int64_t seed = drawn.captured_ ? value(drawn.seed_.ptr) : static_cast<int64_t>(drawn.seed_.val);
    const int64_t offset = drawn.captured_ ? value(drawn.offset_.ptr) : static_cast<int64_t>(drawn.offset_.val);
    on_host(t).random_(from, to, at::detail::createCPUGenerator(static_cast<uint64_t>(seed * 1000003 + offset)));
    return 0;
  });
  return t;
}

void on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  drain();
  at::native::cpu_fallback(op, stack);
}

// torch_npu has a kernel of its own for this operator. TEST_NPU_SDPA=drops_mask: one that ignores attn_mask.
at::Tensor own_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                         const std::optional<at::Tensor>& mask, double dropout, bool causal,
                         std::optional<double> scale, bool gqa) {
  drain();
  state.log += "torch_npus_attention ";
  const char* const how = std::getenv("TEST_NPU_SDPA");
  const bool drops = how && std::string(how) == "drops_mask";
  std::optional<at::Tensor> host_mask;
  if (mask && !drops) {
    host_mask = on_host(*mask);
    if (mask->scalar_type() == at::kBool)
      host_mask = at::zeros(mask->sizes(), q.options().device(at::kCPU)).masked_fill(~*host_mask, -INFINITY);
  }
  return std::get<0>(at::_scaled_dot_product_attention_math(on_host(q), on_host(k), on_host(v), host_mask, dropout,
                                                            causal, {}, scale, gqa))
      .to(kDevice);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("scaled_dot_product_attention", &own_attention);
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("fill_.Scalar", &fill);
  m.impl("zero_", &zero);
  m.impl("random_.from", &random);
}
TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_cpu>()); }
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

// What a captured graph finds in the generator's memory.
at::Tensor captured_seed, captured_offset;

}  // namespace

// --- torch_npu
// ---------------------------------------------------------------------------------------------------------

namespace c10_npu {

NPUStream getCurrentNPUStream(c10::DeviceIndex) {
  return NPUStream(NPUStream::UNCHECKED, c10::Stream(c10::Stream::DEFAULT, kDevice));
}
aclrtStream NPUStream::stream(bool need_empty) const {
  TORCH_CHECK(!need_empty, "the queue must not be waited for");
  return &state;
}

}  // namespace c10_npu

namespace at_npu {

int64_t native::get_npu_format(const at::Tensor&) { return state.format; }

void native::OpCommand::RunOpApiV2(const std::string& name, const PROC_FUNC& run, bool sync) {
  TORCH_CHECK(!sync, "nothing must be waited for");
  enqueue(name, run);
}

NPUGeneratorImpl::NPUGeneratorImpl(c10::DeviceIndex index)
    : c10::GeneratorImpl(c10::Device(kNpu, index), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
      state_(c10::make_intrusive<NPUGeneratorState>()) {}
void NPUGeneratorImpl::set_current_seed(uint64_t seed) {
  state_->seed_ = seed;
  state_->philox_offset_per_thread_ = 0;
}
PhiloxNpuState NPUGeneratorImpl::philox_npu_state(uint64_t increment) {
  if (state.capturing) return {&captured_seed, &captured_offset, 8};
  const uint64_t offset = state_->philox_offset_per_thread_;
  state_->philox_offset_per_thread_ += increment;
  return {state_->seed_, offset};
}
void NPUGeneratorImpl::set_offset(uint64_t offset) { state_->philox_offset_per_thread_ = offset; }
uint64_t NPUGeneratorImpl::get_offset() const { return state_->philox_offset_per_thread_; }
uint64_t NPUGeneratorImpl::current_seed() const { return state_->seed_; }
uint64_t NPUGeneratorImpl::seed() { return state_->seed_; }
c10::DeviceType NPUGeneratorImpl::device_type() { return kNpu; }
// The rest of the class, which is not called here.
void NPUGeneratorImpl::set_state(const c10::TensorImpl&) { TORCH_CHECK(false, "not part of this device"); }
c10::intrusive_ptr<c10::TensorImpl> NPUGeneratorImpl::get_state() const { TORCH_CHECK(false, "nor is this"); }
void NPUGeneratorImpl::graphsafe_set_state(const c10::intrusive_ptr<GeneratorImpl>&) { TORCH_CHECK(false, "nor this"); }
c10::intrusive_ptr<c10::GeneratorImpl> NPUGeneratorImpl::graphsafe_get_state() const { TORCH_CHECK(false, "nor this"); }
NPUGeneratorImpl* NPUGeneratorImpl::clone_impl() const { TORCH_CHECK(false, "nor this"); }

const at::Generator& detail::getDefaultNPUGenerator(c10::DeviceIndex) {
  static const at::Generator generator = at::make_generator<NPUGeneratorImpl>(c10::DeviceIndex(0));
  return generator;
}

}  // namespace at_npu

// --- CANN
// --------------------------------------------------------------------------------------------------------------

extern "C" {
aclError aclrtGetDevice(int32_t* device) {
  *device = 0;
  return ACL_SUCCESS;
}
aclError aclGetDeviceCapability(uint32_t, aclDeviceInfo what, int64_t* value) {
  *value = kCores;
  return what == ACL_DEVICE_INFO_AI_CORE_NUM ? ACL_SUCCESS : 1;
}
aclError aclrtGetLastError(aclrtLastErrLevel) { return std::exchange(state.last_error, ACL_SUCCESS); }
const char* aclGetRecentErrMsg() { return state.error.empty() ? nullptr : state.error.c_str(); }
aclError aclrtGetDeviceSatMode(aclrtFloatOverflowMode* mode) {
  const char* const saturates = std::getenv("TEST_NPU_SATURATES");
  *mode = saturates ? ACL_RT_OVERFLOW_MODE_SATURATION : ACL_RT_OVERFLOW_MODE_INFNAN;
  return ACL_SUCCESS;
}
const char* aclrtGetSocName() { return std::getenv("TEST_NPU_SOC"); }
}

namespace {

// TEST_NPU_BREAK, "KERNEL:HOW", breaks one: it hangs, ends with an error, is skipped, or is missing, which its launcher
// does not say.
bool is_broken(const std::string& kernel, const char* how) {
  const char* const broken = std::getenv("TEST_NPU_BREAK");
  return broken && broken == kernel + ":" + how;
}

// Any kernel may touch any memory that is allocated; what lies outside is reported. The emulator has a record of
// accesses for every two bytes, the smallest elements but those of the mask, as in its own backend: they take 24 times
// as much memory as the tensors.
template <class Kernel>
uint32_t run(const std::string& name, AscendC::KernelMetaType type, uint32_t blocks, aclrtStream stream, Kernel kernel,
             FlashattnBytes* arguments) {
  if (stream != &state) return 1;
  if (is_broken(name, "hang")) std::this_thread::sleep_for(std::chrono::hours(1));
  if (is_broken(name, "error")) return 507015;
  if (is_broken(name, "skip")) return 0;
  if (is_broken(name, "missing")) {
    state.last_error = 107001;
    state.error = "[kernel " + name + " is not registered]";
    return 0;
  }
  ascend_emulator::GlobalMemory gm;
  const uint32_t element = name == "flash_dropout_mask" ? 1 : 2;
  for (const auto& [block, bytes] : state.memory)
    gm.add("allocation", block, bytes, ascend_emulator::Use::accumulator, element);
  const ascend_emulator::Report report =
      ascend_emulator::launch(type, static_cast<int>(blocks), {}, gm, [&] { kernel(*arguments); });
  for (const std::string& error : report.errors) state.error += "\n" + error;
  return report.errors.empty() ? 0 : 2;
}

}  // namespace

#define TYPE_FLASHATTN_MIXED AscendC::KERNEL_TYPE_MIX_AIC_1_2
#define TYPE_FLASHATTN_VECTOR AscendC::KERNEL_TYPE_AIV_ONLY
#define LAUNCHER(cores, stage, type, options, name)                                                        \
  extern "C" uint32_t aclrtlaunch_##name(uint32_t blocks, aclrtStream stream, FlashattnBytes* arguments) { \
    return run(#name, TYPE_##cores, blocks, stream, name, arguments);                                      \
  }
FLASHATTN_KERNELS(LAUNCHER)

// --- for the tests
// -----------------------------------------------------------------------------------------------------

extern "C" {
void npu_register() {
  static Hooks hooks;
  at::RegisterPrivateUse1HooksInterface(&hooks);
}
void npu_manual_seed(uint64_t seed) {
  at::Generator generator = at_npu::detail::getDefaultNPUGenerator(0);
  generator.set_current_seed(seed);
}
void npu_set_format(int64_t format) { state.format = format; }
// An operator of another library leaves an error behind.
void npu_fail_before(int error) { state.last_error = error; }
size_t npu_queued() { return state.queue.size(); }
// Kernels that ran since the last call.
const char* npu_ran() {
  static std::string text;
  drain();
  text.swap(state.log);
  state.log.clear();
  return text.c_str();
}
void npu_capture(int64_t seed, int64_t offset) {
  captured_seed = at::scalar_tensor(seed, at::kLong).to(kDevice);
  captured_offset = at::scalar_tensor(offset, at::kLong).to(kDevice);
  drain();
  state.capturing = true;
}
void npu_end_capture() { state.capturing = false; }
void npu_replay(int64_t seed, int64_t offset) {
  captured_seed.fill_(seed);
  captured_offset.fill_(offset);
  for (const Launch& launch : state.graph) state.queue.push_back(launch);
}
}
