// Host stand-in for CANN's kernel_operator.h: the only header that a kernel includes. docs/ascend_emulator.md says how
// it runs.
#pragma once

#include "../copy.h"
#include "../cube.h"
#include "../half.h"
#include "../machine.h"
#include "../queue.h"
#include "../tensor.h"
#include "../vector.h"
