// The table of the backend "ascend", and what its library exports (csrc/backend/backend.h).
#pragma once

#include "../../csrc/backend/backend.h"

namespace flashattn_ext {
namespace ascend {

const Backend& npu_backend();

}  // namespace ascend
}  // namespace flashattn_ext
