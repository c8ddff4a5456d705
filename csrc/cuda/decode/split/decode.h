// Decoding on GPUs of compute capability 8.0 and newer, shared by both CUDA backends.
#pragma once

#include <cstddef>
#include <string>

#include "params.h"

namespace flashattn_ext::decode {

// Empty if the kernels support the call, otherwise the reason for the error message. The backend checks the compute
// capability.
std::string refuses(const DecodeParams& p);

size_t workspace_bytes(const DecodeParams& p);
void run(const DecodeParams& p);

}  // namespace flashattn_ext::decode
