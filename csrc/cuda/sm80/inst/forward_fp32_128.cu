#include "../forward.cuh"

template void flashattn_ext::sm80::forward<float, 128>(const flashattn_ext::AttnParams&);
