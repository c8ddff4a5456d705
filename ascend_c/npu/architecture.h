// Whether a library that was built for one chip runs on another. Launching it on a wrong one would end in an "invalid
// device function" much later.
#pragma once

#include <string>

namespace flashattn_ext {
namespace ascend {

struct Architecture {
  std::string name, soc, series, socs;  // a row of architectures.def
  bool has(const std::string& chip) const { return (" " + socs + " ").find(" " + chip + " ") != std::string::npos; }
};

// The row of a chip; of several names the last one, which no other series could be taken for.
inline Architecture architecture_of(const std::string& chip) {
  Architecture found;
#define ARCHITECTURE(name, soc, series, socs) \
  if (Architecture{name, soc, series, socs}.has(chip)) found = {name, soc, series, socs};
#define FIRST_GENERATION(socs) \
  if (found.name.empty() && Architecture{"", "", "", socs}.has(chip)) found = {"", "", "first generation", socs};
#include "architectures.def"
#undef ARCHITECTURE
#undef FIRST_GENERATION
  return found;
}

// Empty where the library runs on the device, otherwise what is wrong and what to do. `device`: as aclrtGetSocName has
// it; empty when there is none.
inline std::string wrong_device(const std::string& built_for, const std::string& device) {
  const std::string again = "build the kernels again, from the checkout: bash build.sh -arch ";
  if (device.empty())
    return "the Ascend runtime does not name the device; see whether npu-smi info lists one, and source CANN's "
           "set_env.sh";
  const Architecture library = architecture_of(built_for), chip = architecture_of(device);
  if (!chip.name.empty() && chip.series == library.series) return {};
  const std::string text =
      "the Ascend C kernels were built for " + built_for + " (" + library.series + "), but this device is " + device;
  if (chip.series.empty())
    return text + ", which they do not know; bash build.sh -help lists the chips that they run on";
  if (chip.name.empty())
    return text + ", a first-generation chip, on which they cannot run; use torch's scaled_dot_product_attention there";
  return text + " (" + chip.series + "); " + again + chip.name;
}

}  // namespace ascend
}  // namespace flashattn_ext
