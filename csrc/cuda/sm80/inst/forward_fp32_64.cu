#include "../forward.cuh"

template void flashattn_ext::sm80::forward<float, 64>(const flashattn_ext::AttnParams&);
