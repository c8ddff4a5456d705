// Declarations of the kernels, for a launcher that calls them by name.
#pragma once

#include "entry.h"
#include "kernel_list.h"

#define FLASHATTN_DECLARE(cores, stage, type, options, name) FLASHATTN_KERNEL(cores, name);
FLASHATTN_KERNELS(FLASHATTN_DECLARE)
#undef FLASHATTN_DECLARE
