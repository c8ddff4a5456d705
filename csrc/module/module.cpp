// The Python module flashattn_ext._C: functions that are not ops. Importing it also registers the ops of ops.cpp.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <map>

#include "backend/backend.h"
#include "call/layout_warning.h"
#include "call/options.h"
#include "cpu/caches.h"
#include "cpu/isa.h"
#include "cpu/kernels.h"
#include "module/eager_op.h"
#if defined(FLASHATTN_EXT_CUDA)
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>
#endif

namespace flashattn_ext {
namespace {

std::string compiler() {
#if defined(__clang__)
  return "clang " __clang_version__;
#else
  return "gcc " __VERSION__;
#endif
}

std::vector<std::string> backend_names() {
  std::vector<std::string> names;
  for (const Backend* backend : backends()) names.push_back(backend->name);
  return names;
}

// The current stream of a CUDA device, 0 for the default stream, and the id of its graph capture, 0 for none. In a
// build without CUDA nothing calls it, and it returns zeros.
std::pair<int64_t, uint64_t> cuda_stream_and_capture(int device) {
#if defined(FLASHATTN_EXT_CUDA)
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream(static_cast<c10::DeviceIndex>(device)).stream();
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long capture = 0;
  C10_CUDA_CHECK(cudaStreamGetCaptureInfo(stream, &status, &capture));
  return {reinterpret_cast<int64_t>(stream), status == cudaStreamCaptureStatusActive ? capture : 0};
#else
  return {0, 0};
#endif
}

std::vector<std::pair<int, int64_t>> cpu_caches() {
  std::vector<std::pair<int, int64_t>> caches;
  for (const Cache& cache : data_caches()) caches.emplace_back(cache.level, cache.bytes);
  return caches;
}

std::pair<int64_t, int64_t> pair_of(const TileSize& size) { return {size.queries, size.keys}; }
std::pair<int64_t, int64_t> cpu_tile(const std::string& dtype, int64_t head_dim) {
  const std::map<std::string, DType> dtypes{
      {"fp16", DType::kFloat16}, {"bf16", DType::kBFloat16}, {"fp32", DType::kFloat32}, {"fp64", DType::kFloat64}};
  AttnParams params;
  params.dtype = dtypes.at(dtype);
  params.head_dim = params.head_dim_v = head_dim;
  return pair_of(cpu_kernels(params.dtype).tile_size(params));
}
std::pair<int64_t, int64_t> cpu_tile_that_fits(int64_t l2_bytes, int64_t row_bytes, int64_t score_bytes) {
  return pair_of(tile_that_fits(l2_bytes, row_bytes, score_bytes));
}
void set_cpu_tile(int64_t queries, int64_t keys) { set_tile_size({queries, keys}); }

pybind11::object default_of(const Option& option) {
  switch (option.type) {
    case OptionType::kInteger:
      return pybind11::int_(static_cast<int64_t>(option.default_value));
    case OptionType::kNumber:
      return pybind11::float_(option.default_value);
    case OptionType::kFlag:
      return pybind11::bool_(option.default_value != 0);
    default:
      return pybind11::none();
  }
}

// The rows of options.def, for flashattn_ext/options.py.
std::vector<pybind11::dict> described_options() {
  constexpr const char* kDims[] = {"", "sequences", "heads", "batch_heads", "scores", "batch_kv_heads", "blocks"};
  constexpr const char* kGradients[] = {"", "always", "if_needed"};
  std::vector<pybind11::dict> all;
  for (const Option& option : kOptions) {
    using pybind11::operator""_a;
    all.push_back(pybind11::dict(
        "name"_a = option.name, "type"_a = schema_type(option.type), "default"_a = default_of(option),
        "dims"_a = kDims[static_cast<int>(option.dims)], "gradient"_a = kGradients[static_cast<int>(option.gradient)],
        "is_of_distance"_a = option.is_of_distance, "decodes"_a = option.takers == Takers::kEveryOp));
  }
  return all;
}

}  // namespace
}  // namespace flashattn_ext

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace flashattn_ext;
  m.def("compiler", &compiler, "The C++ compiler of this build.");
  m.def("backends", &backend_names, "Names of the compiled backends, the preferred one of each device first.");
  m.def("load_backend", &load_backend, "Adds the backend of a library.");
  m.def("announce_backend", &announce_backend, pybind11::arg("device"), pybind11::arg("path"),
        "Registers a library that is loaded at the first tensor of a device.");
  m.def("load_announced_backend", &load_announced_backend, pybind11::arg("device"),
        "Loads the announced library of a device now.");
  m.def("force_backend", &force_backend, "Forces a backend for the process; '' chooses by device again.");
  m.def("forced_backend", &forced_backend, "The forced backend, or ''.");
  m.def("check_cuda_path", &check_cuda_path, "Raises if FLASHATTN_EXT_CUDA_PATH names no CUDA backend.");
  m.def("cuda_stream_and_capture", &cuda_stream_and_capture, pybind11::arg("device"),
        "The current stream of a CUDA device, and the id of its graph capture or 0.");
  m.def("eager_op", &eager_op, pybind11::arg("name"),
        "The overload `call` of an op as a function of plain arguments; it returns None if torch's parser is needed.");
  m.def(
      "set_layout_warning",
      [](const pybind11::object& function) {
        // Never released: the interpreter may be gone when this library's variables are destroyed.
        warn_of_layout = [warning = pybind11::handle(function.inc_ref())](int64_t rows, int64_t keys) {
          const pybind11::gil_scoped_acquire held;
          warning(rows, keys);
        };
      },
      pybind11::arg("function"),
      "Sets the function of two sizes, rows and keys, that warns of tensors in another layout than the call "
      "says.");
  m.def("options", &described_options,
        "The arguments of the attention ops besides q, k and v, in their order: options.def.");
  m.def("cpu_isas", &cpu_isas, "Instruction sets that the CPU backend can use here, fastest first.");
  m.def("cpu_isa", &cpu_isa, "The instruction set in use.");
  m.def("cpu_peak_gflops", &cpu_peak_gflops, pybind11::arg("threads"),
        pybind11::call_guard<pybind11::gil_scoped_release>(),
        "Measured peak of fp32 multiply-adds of that many threads together, in GFLOP/s.");
  m.def("set_cpu_isa", &set_cpu_isa, "Chooses one of cpu_isas().");
  m.def("cpu_caches", &cpu_caches, "Level and bytes of the known data caches of one core.");
  m.def("cpu_tile", &cpu_tile, pybind11::arg("dtype"), pybind11::arg("head_dim"),
        "Queries and keys of a tile of the CPU kernels for fp16, bf16, fp32 or fp64 inputs.");
  m.def("cpu_tile_that_fits", &cpu_tile_that_fits, pybind11::arg("l2_bytes"), pybind11::arg("row_bytes"),
        pybind11::arg("score_bytes"), "Queries and keys of a tile for a given L2 cache: tile_size.h.");
  m.def("set_cpu_tile", &set_cpu_tile, pybind11::arg("queries"), pybind11::arg("keys"),
        "Overrides the tile of every call; (0, 0) restores the default.");
}
