// Instruction sets of the CPU backend: which ones this build and this machine have, and which one runs.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace flashattn_ext {

// Fastest first, out of "avx512_bf16", "avx512", "avx2", "generic"; only what was compiled and what the CPU supports.
std::vector<std::string> cpu_isas();

// The one in use: FLASHATTN_EXT_ISA if set when first asked, else the fastest.
std::string cpu_isa();

// Throws std::invalid_argument naming the choices when `name` is not one of cpu_isas().
void set_cpu_isa(const std::string& name);

// Queries and keys of a tile of fp32 and 16-bit inputs, with the instruction set in use (tiles.h).
std::pair<int64_t, int64_t> cpu_tile();

// Measured peak of fp32 multiply-adds in GFLOP/s, that many threads together, with the instruction set in use
// (peak.cpp).
double cpu_peak_gflops(int threads);

}  // namespace flashattn_ext
