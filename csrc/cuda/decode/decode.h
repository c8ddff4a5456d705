// Calls with a key-value cache on every GPU of compute capability 8.0 and newer, for the tables of both CUDA backends.
#pragma once

#include <cstddef>
#include <string>

#include "../../params.h"

namespace flashattn_ext::decode {

// Empty when the kernels can run the call; otherwise the reason in words. Which GPU it is the backend has to ask.
std::string refuses(const DecodeParams& p);

size_t workspace_bytes(const DecodeParams& p);
void run(const DecodeParams& p);

}  // namespace flashattn_ext::decode
