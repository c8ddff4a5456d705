#include "../forward.cuh"

template void flashattn_ext::sm80::forward<__half, 256>(const flashattn_ext::AttnParams&);
