// The host side of the Ascend C backends: what they can do, how much workspace a call needs, on how many cores it runs.
// The NPU build and the emulator differ only in how they launch a kernel.
#pragma once

#include <string>

#include "../csrc/params.h"
#include "arguments.h"

namespace flashattn_ext {
namespace ascend {

// Empty, or the reason why the call cannot run.
std::string supports(const AttnParams& p, bool backward);

// Of all `cores` together.
size_t forward_workspace_bytes(const AttnParams& p, int64_t cores);

// How many of `cores` get any work.
int64_t forward_cores(const AttnParams& p, int64_t cores);

Arguments arguments_of(const AttnParams& p);

}  // namespace ascend
}  // namespace flashattn_ext
