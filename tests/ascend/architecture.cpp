// Prints what wrong_device() says. Usage: architecture BUILT_FOR DEVICE...
#include "../../ascend_c/npu/architecture.h"

#include <iostream>

int main(int count, char** words) {
  for (int i = 2; i < count; ++i) std::cout << flashattn_ext::ascend::wrong_device(words[1], words[i]) << "\n";
}
