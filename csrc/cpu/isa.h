// Instruction sets of the CPU backend: the available ones, and the one in use.
#pragma once

#include <string>
#include <vector>

namespace flashattn_ext {

// Fastest first, out of "avx512_bf16", "avx512", "avx2", "generic" on x86-64 and "neon_bf16", "neon", "generic" on
// AArch64; only sets that are compiled in and that the CPU supports.
std::vector<std::string> cpu_isas();

// The instruction set in use: FLASHATTN_EXT_ISA if set at the first call, else the fastest.
std::string cpu_isa();

// Throws std::invalid_argument naming the choices when `name` is not one of cpu_isas().
void set_cpu_isa(const std::string& name);

// Measured peak of fp32 multiply-adds of all threads together, in GFLOP/s, with the instruction set in use.
double cpu_peak_gflops(int threads);

}  // namespace flashattn_ext
