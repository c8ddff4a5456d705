#include "../forward.cuh"

template void flashattn_ext::sm80::forward<float, 144>(const flashattn_ext::AttnParams&);
