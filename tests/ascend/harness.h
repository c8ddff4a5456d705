// Common parts of the emulator's test programs: the command line (mode, seed), GM tensors, files, and printing the
// report.
#pragma once

#include <cstdlib>
#include <fstream>
#include <iostream>
#include <iterator>
#include <string>
#include <vector>

#include "kernel_operator.h"

inline ascend_emulator::Options parse_options(const std::string& mode, const std::string& seed = "0") {
  using ascend_emulator::Mode;
  return {mode == "late" ? Mode::late : mode == "random" ? Mode::random : Mode::eager, std::stoull(seed)};
}

inline std::vector<uint8_t> read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

inline void write_file(const std::string& path, const std::vector<uint8_t>& bytes) {
  std::ofstream(path, std::ios::binary)
      .write(reinterpret_cast<const char*>(bytes.data()), std::streamsize(bytes.size()));
}

inline void print(const ascend_emulator::Report& report) {
  for (const std::string& error : report.errors) std::cout << "error: " << error << "\n";
  for (const std::string& warning : report.warnings) std::cout << "warning: " << warning << "\n";
  const auto& counters = report.counters;
  const auto row = [](const char* name, const auto& values) {
    std::cout << name;
    for (const auto& value : values) std::cout << " " << value;
    std::cout << "\n";
  };
  row("gm_read", counters.gm_read_bytes);  // tensors, workspace
  row("gm_written", counters.gm_written_bytes);
  row("taken", counters.taken_bytes);  // of UB, L1, L0A, L0B, L0C
  std::cout << "span " << counters.span_cycles << "\n";
  for (size_t p = 0; p < ascend_emulator::kPipes; ++p) {
    double instructions = 0, cycles = 0;
    for (size_t kind = 0; kind < ascend_emulator::kCoreKinds; ++kind) {
      instructions += counters.instructions[kind][p];
      cycles += counters.cycles[kind][p];
    }
    std::cout << ascend_emulator::pipe_name(int(p)) << " " << instructions << " " << cycles << "\n";
  }
}
