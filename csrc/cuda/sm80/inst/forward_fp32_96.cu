#include "../forward.cuh"

template void flashattn_ext::sm80::forward<float, 96>(const flashattn_ext::AttnParams&);
