#include "../forward.cuh"

template void flashattn_ext::sm80::forward<float, 96, 0>(const flashattn_ext::AttnParams&);
